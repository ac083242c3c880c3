"""Runs each operation where its tensors live: Triton kernels on GPUs that can, plain torch everywhere else.

The only module that imports :mod:`kvarn_kernels`, and only when a tensor is on a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from kvarn_hf.config import KVarNConfig
from kvarn_hf.method import normalize
from kvarn_hf.method import quantize as reference
from kvarn_hf.method.quantize import Packed
from kvarn_hf.ops import folded_attention
from kvarn_hf.state.padding import gather_tokens

if TYPE_CHECKING:
    from kvarn_hf.state.layer_state import LayerState
    from kvarn_hf.state.tiles import PackedTiles

# The torch path works on this many elements at a time, so that its temporaries stay in a CPU's cache or small on a GPU.
_CHUNK_ELEMENTS = 1 << 21
_OLDEST_CAPABILITY = (8, 0)

# More query tokens than this are a prefill, which has enough arithmetic to pay for dequantizing.
MOST_QUERY_TOKENS = 16


def uses_kernels(device: torch.device) -> bool:
    """Whether tensors on this device go to the Triton kernels; elsewhere torch does the work."""
    return device.type == "cuda" and _kernels_run_on(device.index or 0)


def key_prescale(window: torch.Tensor) -> torch.Tensor:
    """See :func:`kvarn_hf.method.quantize.key_prescale`."""
    return reference.key_prescale(window)


def imbalance_trace(tile: torch.Tensor, iterations: int, *, relative: bool) -> torch.Tensor:
    """See :func:`kvarn_hf.method.normalize.imbalance_trace`."""
    if uses_kernels(tile.device):
        from kvarn_kernels import imbalance

        if max(tile.shape[-2:]) <= imbalance.LARGEST_SIDE:
            return imbalance.imbalance_trace(tile, iterations, relative)
    return normalize.imbalance_trace(tile, iterations, relative=relative)


def quantize(
    keys: torch.Tensor,
    values: torch.Tensor,
    prescale: torch.Tensor | None,
    tiles: PackedTiles,
    config: KVarNConfig,
    position: int,
    first: torch.Tensor | None,
) -> None:
    """Quantize whole tiles into the free slots behind ``tiles.count``.

    Parameters
    ----------
    keys, values : torch.Tensor
        ``[batch, heads, n * tile_size, head_dim]``, any strides.
    prescale : torch.Tensor, optional
        ``[batch, heads, key_dim]``, float16.
    tiles : PackedTiles
        With room for n more.
    config : KVarNConfig
    position : int
        Position of the first token given.
    first : torch.Tensor, optional
        ``[batch]``, int64: each row's first position that is read from its tiles. Earlier tokens are kept elsewhere,
        and in a tile that begins before it the later tokens take their place, over and over, so that they shape no
        scale. A tile that is wholly before it becomes zero.
    """
    if uses_kernels(keys.device):
        from kvarn_kernels.quantize import quantize_tiles

        quantize_tiles(
            keys,
            values,
            prescale,
            first,
            tiles.keys,
            tiles.values,
            slot=tiles.count,
            position=position,
            key_bits=config.key_bits,
            value_bits=config.value_bits,
            method=config.method,
            iterations=config.iterations,
        )
        return
    size = config.tile_size
    if first is not None:
        keys, values = (repeat_counted(x, first - position, size) for x in (keys, values))
    keys, values = keys.unflatten(2, (-1, size)), values.unflatten(2, (-1, size))
    if prescale is not None:
        prescale = prescale.unsqueeze(2)
    for part in _chunks(keys.shape[2], keys[:, :, 0]):
        out = slice(tiles.count + part.start, tiles.count + part.stop)
        _store(tiles.keys, out, reference.quantize_keys(keys[:, :, part], prescale, config))
        _store(tiles.values, out, reference.quantize_values(values[:, :, part], config))


def dense(state: LayerState) -> tuple[torch.Tensor, torch.Tensor]:
    """All keys and values of a layer, packed tiles dequantized and the rest as it was given.

    Returns
    -------
    keys, values : torch.Tensor
        ``[batch, heads, length, head_dim]`` in the model's dtype.
    """
    if state.count == 0:
        return state.dense.keys, state.dense.values
    config, tiles, padding = state.config, state.tiles, state.padding
    sink = config.sink_length
    if uses_kernels(state.dense.keys.device):
        from kvarn_kernels.dequantize import dequantize_tiles

        return dequantize_tiles(*_stored(state), **_layout(state))
    packed_keys, packed_values = tiles.filled()
    prescale = None if state.prescale is None else state.prescale.unsqueeze(2)

    def assemble(tokens: torch.Tensor, packed: Packed, dequantize: Callable[[Packed], torch.Tensor]) -> torch.Tensor:
        out = tokens.new_empty(*tokens.shape[:2], state.length, tokens.shape[3])
        out[:, :, :sink] = tokens[:, :, :sink]
        out[:, :, state.tail_start :] = tokens[:, :, sink:]
        body = out[:, :, sink : state.tail_start].unflatten(2, (-1, config.tile_size))
        for part in _chunks(tiles.count, body[:, :, 0]):
            body[:, :, part] = dequantize(Packed(*(t[:, :, part] for t in packed)))
        return out

    keys = assemble(state.dense.keys, packed_keys, lambda p: reference.dequantize_keys(p, prescale, config))
    values = assemble(state.dense.values, packed_values, lambda p: reference.dequantize_values(p, config))
    # Reading the flag back would stall a GPU; on a CPU it saves a pass over everything.
    if padding is not None and (keys.device.type != "cpu" or bool((padding.run > 1).any())):
        keys = padding.restored(keys, state.dense.keys[:, :, :sink], padding.key, state.tail_start)
        values = padding.restored(values, state.dense.values[:, :, :sink], padding.value, state.tail_start)
    return keys, values


def attend(
    state: LayerState,
    query: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    tuning: Any = None,
) -> torch.Tensor | None:
    """Attention of a few new tokens over everything a layer holds, reading packed tiles directly.

    Parameters
    ----------
    state : LayerState
    query : torch.Tensor
        ``[batch, query_heads, tokens, key_dim]``, tokens <= :data:`MOST_QUERY_TOKENS`.
    mask : torch.Tensor, optional
        ``[batch or 1, query_heads or 1, tokens or 1, length]``, boolean (True: attend) or additive. None: attend to
        everything.
    scaling : float, optional
        Factor of the scores; None for ``key_dim ** -0.5``.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)``.
    sinks : torch.Tensor, optional
        ``[query_heads]``: a logit per head without a value.
    tuning : kvarn_kernels.launch_table.Tuning, optional
        How the kernel is launched, for measuring that; None takes the launch table's.

    Returns
    -------
    torch.Tensor, optional
        ``[batch, tokens, query_heads, value_dim]``; None where only the dense path can do it.
    """
    if not can_attend(state, query.shape[2]):
        return None
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    if not uses_kernels(query.device):
        with torch.autocast(query.device.type, enabled=False):  # scores in float32, as fused attention has them
            return folded_attention.attend(state, query, mask, scaling, softcap, sinks)
    if query.requires_grad and torch.is_grad_enabled():
        return None  # the kernel has no backward pass
    from kvarn_kernels.decode_attention import decode_attention, supported

    config = state.config
    value_dim = state.dense.value_buffer.shape[3]
    if not supported(query, value_dim, config.tile_size, config.key_bits, config.value_bits):
        return None
    return decode_attention(
        query,
        *_stored(state),
        mask,
        **_layout(state),
        scaling=scaling,
        causal=False,
        softcap=softcap,
        sinks=sinks,
        tuning=tuning,
    )


_Stored: TypeAlias = tuple[
    Packed,
    Packed,
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor,
    torch.Tensor,
    tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
]


def _stored(state: LayerState) -> _Stored:
    """The tensors of a state, in the order in which every kernel that reads one takes them."""
    tiles, dense, padding = state.tiles, state.dense, state.padding
    run = None if padding is None else (padding.length, padding.key, padding.value)
    return tiles.keys, tiles.values, state.prescale, tiles.rows, dense.keys, dense.values, run


def _layout(state: LayerState) -> dict[str, Any]:
    """How those tensors are to be read."""
    config = state.config
    return {
        "count": state.count,
        "sink_length": config.sink_length,
        "key_bits": config.key_bits,
        "value_bits": config.value_bits,
        "rotated": config.method != "rtn",
    }


def can_attend(state: LayerState, tokens: int) -> bool:
    """Whether :func:`attend` takes this many query tokens over this state."""
    if state.count == 0 or tokens > MOST_QUERY_TOKENS:
        return False
    keys = state.dense.key_buffer
    return keys.device.type == "cpu" or (uses_kernels(keys.device) and keys.dtype != torch.float32)


def repeat_counted(x: torch.Tensor, first: torch.Tensor, size: int) -> torch.Tensor:
    """In every tile, replace the tokens before ``first`` (``[batch]``, relative to ``x``) by the later ones."""
    start = torch.arange(0, x.shape[2], size, device=x.device)
    skip = (first[:, None] - start).clamp(0, size)[..., None]  # [batch, tile, 1]
    void = (skip == size).expand(-1, -1, size).flatten(1)  # nothing in these tiles counts
    skip = torch.where(skip == size, 0, skip)
    token = torch.arange(size, device=x.device)
    source = start[:, None] + skip + (token - skip) % (size - skip)
    return gather_tokens(x, source.flatten(1)).masked_fill(void[:, None, :, None], 0)


def _chunks(count: int, tile: torch.Tensor) -> list[slice]:
    step = max(1, _CHUNK_ELEMENTS // max(1, tile.numel()))
    return [slice(i, min(i + step, count)) for i in range(0, count, step)]


def _store(arena: Packed, where: slice, tiles: Packed) -> None:
    for target, source in zip(arena, tiles, strict=True):
        target[:, :, where] = source


@cache
def _kernels_run_on(index: int) -> bool:
    reason = None
    if torch.version.hip is not None:
        reason = "the kernels are tested on NVIDIA GPUs only"
    elif torch.cuda.get_device_capability(index) < _OLDEST_CAPABILITY:
        reason = "the kernels need compute capability 8.0 or newer, this GPU has {}.{}".format(
            *torch.cuda.get_device_capability(index)
        )
    else:
        try:
            import triton  # noqa: F401
        except ImportError:
            reason = "Triton is not installed"
    if reason is not None:
        warnings.warn(f"KVarN runs in plain torch on cuda:{index}, more slowly: {reason}", stacklevel=2)
    return reason is None
