"""Runs each operation where its tensors live: Triton kernels on GPUs that can, plain torch everywhere else.

:mod:`kvarn_kernels` is imported only when a tensor is on a GPU.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from kvarn_hf.config import KVarNConfig
from kvarn_hf.method import normalize
from kvarn_hf.method import quantize as method
from kvarn_hf.ops import plain
from kvarn_hf.state.layer_state import LayerState
from kvarn_hf.state.storage import Layout
from kvarn_hf.state.tiles import PackedTiles

if TYPE_CHECKING:
    from kvarn_kernels import Held, Scheme

_OLDEST_CAPABILITY = (8, 0)

# More query tokens than this are a prefill, which has enough arithmetic to pay for dequantizing.
MOST_QUERY_TOKENS = 16


def uses_kernels(device: torch.device) -> bool:
    """Whether tensors on this device go to the Triton kernels; elsewhere torch does the work."""
    return device.type == "cuda" and _kernels_run_on(device.index or 0)


def key_prescale(window: torch.Tensor) -> torch.Tensor:
    """See :func:`kvarn_hf.method.quantize.key_prescale`."""
    return method.key_prescale(window)


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
    if not uses_kernels(keys.device):
        return plain.quantize(keys, values, prescale, tiles, config, position, first)
    from kvarn_kernels import Packed, quantize_tiles

    arenas = Packed(*tiles.keys), Packed(*tiles.values)
    quantize_tiles(keys, values, prescale, first, *arenas, scheme(config), slot=tiles.count, position=position)


def dense(state: LayerState) -> tuple[torch.Tensor, torch.Tensor]:
    """All keys and values of a layer, packed tiles dequantized and the rest as it was given.

    Returns
    -------
    keys, values : torch.Tensor
        ``[batch, heads, length, head_dim]`` in the model's dtype.
    """
    if state.count == 0:
        return state.dense.keys, state.dense.values
    if not uses_kernels(state.device):
        return plain.dense(state)
    from kvarn_kernels import dequantize_tiles

    return dequantize_tiles(held(state))


def attend(
    state: LayerState,
    query: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    **launch: Any,
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
    **launch
        ``tuning`` and ``slices`` of :func:`kvarn_kernels.decode_attention.decode_attention`, for measurements.

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
            return plain.attend(state, query, mask, scaling, softcap, sinks)
    if query.requires_grad and torch.is_grad_enabled():
        return None  # the kernel has no backward pass
    return attend_held(held(state), query, mask, scaling=scaling, softcap=softcap, sinks=sinks, **launch)


def attend_held(layer: Held, query: torch.Tensor, mask: torch.Tensor | None, **options: Any) -> torch.Tensor | None:
    """The kernel's attention over what a layer holds; None where it does not take the query."""
    from kvarn_kernels.decode_attention import decode_attention, supported

    bits = layer.scheme.key_bits, layer.scheme.value_bits
    if not supported(query, layer.dense_values.shape[3], layer.tile_size, *bits):
        return None
    return decode_attention(query, layer, mask, causal=False, **options)


def can_attend(state: LayerState, tokens: int) -> bool:
    """Whether :func:`attend` takes this many query tokens over this state."""
    if state.count == 0 or tokens > MOST_QUERY_TOKENS:
        return False
    keys = state.dense.key_buffer
    return keys.device.type == "cpu" or (uses_kernels(keys.device) and keys.dtype != torch.float32)


def held(state: LayerState) -> Held:
    """A layer as the kernels that read it take it."""
    from kvarn_kernels import Held, Packed, Run

    tiles, padding = state.tiles, state.padding
    run = None if padding is None else Run(padding.length, padding.key, padding.value)
    return Held(
        Packed(*tiles.keys),
        Packed(*tiles.values),
        state.prescale,
        tiles.rows,
        state.dense.keys,
        state.dense.values,
        run,
        state.count,
        state.config.sink_length,
        scheme(state.config),
    )


def scheme(config: KVarNConfig | Layout) -> Scheme:
    """How tiles are packed, as kernels take it."""
    from kvarn_kernels import Scheme

    return Scheme(config.key_bits, config.value_bits, config.method, config.iterations)


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
