"""Every operation on a layer in plain torch: the path of CPUs, and of GPUs that the kernels do not run on."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvarn_hf.config import KVarNConfig
from kvarn_hf.method import quantize as method
from kvarn_hf.method.attention import attention_weights
from kvarn_hf.method.quantize import Packed
from kvarn_hf.method.rotation import rotate
from kvarn_hf.state.layer_state import LayerState
from kvarn_hf.state.padding import LeftPadding, gather_tokens
from kvarn_hf.state.tiles import PackedTiles

# Work is cut into chunks of so many elements, so that temporaries stay in a CPU's cache or small on a GPU.
_TILE_ELEMENTS = 1 << 21
_CODE_ELEMENTS = 1 << 18


def quantize(
    keys: torch.Tensor,
    values: torch.Tensor,
    prescale: torch.Tensor | None,
    tiles: PackedTiles,
    config: KVarNConfig,
    position: int,
    first: torch.Tensor | None,
) -> None:
    """See :func:`kvarn_hf.ops.quantize`."""
    size = config.tile_size
    if first is not None:
        keys, values = (repeat_counted(x, first - position, size) for x in (keys, values))
    keys, values = keys.unflatten(2, (-1, size)), values.unflatten(2, (-1, size))
    if prescale is not None:
        prescale = prescale.unsqueeze(2)
    for part in _chunks(keys.shape[2], keys[:, :, 0].numel(), _TILE_ELEMENTS):
        slots = slice(tiles.count + part.start, tiles.count + part.stop)
        _store(tiles.keys, slots, method.quantize_keys(keys[:, :, part], prescale, config))
        _store(tiles.values, slots, method.quantize_values(values[:, :, part], config))


def dense(state: LayerState) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`kvarn_hf.ops.dense`; ``state`` holds at least one tile."""
    config, padding = state.config, state.padding
    packed_keys, packed_values = state.tiles.filled()
    prescale = None if state.prescale is None else state.prescale.unsqueeze(2)
    keys = _assembled(state, state.dense.keys, packed_keys, lambda p: method.dequantize_keys(p, prescale, config))
    values = _assembled(state, state.dense.values, packed_values, lambda p: method.dequantize_values(p, config))
    # Reading the flag back would stall a GPU; on a CPU it saves a pass over everything.
    if padding is not None and (keys.device.type != "cpu" or bool((padding.run > 1).any())):
        sink = config.sink_length
        keys = padding.restored(keys, state.dense.keys[:, :, :sink], padding.key, state.tail_start)
        values = padding.restored(values, state.dense.values[:, :, :sink], padding.value, state.tail_start)
    return keys, values


def attend(
    state: LayerState,
    query: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See :func:`kvarn_hf.ops.attend`; ``state`` holds at least one tile.

    Per tile, with q the rotated (and un-prescaled) query and p the softmax weights::

        score[t] = token_scale[t] * (sum_d (q[d] * channel_scale[d]) * code[t, d]  +  sum_d q[d] * zero_point[d])
        out[d]   = channel_scale[d] * (sum_t (p[t] * token_scale[t]) * code[t, d]  +  sum_t p[t] * zero_point[t])

    so neither are codes scaled nor are tiles rotated back: the query is rotated once, and the output once.
    """
    batch, query_heads, tokens, _ = query.shape
    keys, values = state.dense.keys.float(), state.dense.values.float()
    heads, sink = keys.shape[1], state.config.sink_length
    run_key, run_value = keys[:, :, :0], values[:, :, :0]
    if state.padding is not None:
        run_key, run_value = state.padding.key.float(), state.padding.value.float()
    # All queries of a KV head are rows of one matrix: [batch, heads, groups * tokens, channel].
    rows = (query.float() * scaling).reshape(batch, heads, -1, query.shape[3])
    packed_keys, packed_values = state.tiles.filled()
    of_dense, of_run = (rows @ x.mT for x in (keys, run_key))
    parts = of_dense[..., :sink], _tile_scores(rows, packed_keys, state), of_dense[..., sink:], of_run
    scores = torch.cat(parts, -1).reshape(batch, query_heads, tokens, -1)
    weights = attention_weights(scores, _mask_of_parts(state, mask), softcap=softcap, sinks=sinks)
    weights = weights.reshape(batch, heads, -1, scores.shape[-1])
    of_sinks, of_tiles, of_tail, of_run = weights.split([part.shape[-1] for part in parts], -1)
    out = torch.cat([of_sinks, of_tail, of_run], -1) @ torch.cat([values, run_value], 2)
    out = out + _tile_output(of_tiles, packed_values, state)
    return out.reshape(batch, query_heads, tokens, -1).transpose(1, 2).to(query.dtype)


def repeat_counted(x: torch.Tensor, first: torch.Tensor, size: int) -> torch.Tensor:
    """In every tile, replace the tokens before ``first`` (``[batch]``, relative to ``x``) by the later ones.

    ``x`` is ``[batch, heads, tiles * size, head_dim]``. A tile of which nothing counts becomes zero.
    """
    start = torch.arange(0, x.shape[2], size, device=x.device)
    skip = (first[:, None] - start).clamp(0, size)[..., None]  # [batch, tile, 1]
    void = (skip == size).expand(-1, -1, size).flatten(1)
    skip = torch.where(skip == size, 0, skip)
    token = torch.arange(size, device=x.device)
    source = start[:, None] + skip + (token - skip) % (size - skip)
    return gather_tokens(x, source.flatten(1)).masked_fill(void[:, None, :, None], 0)


def _assembled(
    state: LayerState, tokens: torch.Tensor, packed: Packed, dequantize: Callable[[Packed], torch.Tensor]
) -> torch.Tensor:
    """Sinks, dequantized tiles and tail in one tensor."""
    sink, size = state.config.sink_length, state.config.tile_size
    out = tokens.new_empty(*tokens.shape[:2], state.length, tokens.shape[3])
    out[:, :, :sink] = tokens[:, :, :sink]
    out[:, :, state.tail_start :] = tokens[:, :, sink:]
    body = out[:, :, sink : state.tail_start].unflatten(2, (-1, size))
    for part in _chunks(state.count, body[:, :, 0].numel(), _TILE_ELEMENTS):
        body[:, :, part] = dequantize(Packed(*(t[:, :, part] for t in packed)))
    return out


def _tile_scores(rows: torch.Tensor, keys: Packed, state: LayerState) -> torch.Tensor:
    """``[batch, heads, row, packed tokens]``."""
    bits = state.config.key_bits
    if state.prescale is not None:
        rows = rows / state.prescale.float().unsqueeze(2)
    if state.config.method != "rtn":
        rows = rotate(rows)
    out = rows.new_empty(*rows.shape[:3], state.count, state.config.tile_size)
    for part in _chunks(state.count, keys.codes[:, :, 0].numel() * 8 // bits, _CODE_ELEMENTS):
        codes = method.key_codes(keys.codes[:, :, part], bits)  # [batch, heads, tile, token, channel]
        scaled = rows.unsqueeze(2) * keys.channel_scale[:, :, part].float().unsqueeze(3)
        zero = (keys.zero_point[:, :, part].float() @ rows.mT).mT.unsqueeze(4)  # [batch, heads, row, tile, 1]
        products = (scaled @ codes.mT).transpose(2, 3)
        out[:, :, :, part] = (products + zero) * keys.token_scale[:, :, None, part].float()
    return out.flatten(3)


def _tile_output(weights: torch.Tensor, values: Packed, state: LayerState) -> torch.Tensor:
    """``[batch, heads, row, channel]`` of weights ``[batch, heads, row, packed tokens]``."""
    bits = state.config.value_bits
    weights = weights.unflatten(3, (state.count, -1)).transpose(2, 3)  # [batch, heads, tile, row, token]
    total = weights.new_zeros(*weights.shape[:2], weights.shape[3], values.channel_scale.shape[3])
    for part in _chunks(state.count, values.codes[:, :, 0].numel() * 8 // bits, _CODE_ELEMENTS):
        codes = method.value_codes(values.codes[:, :, part], bits)
        weight = weights[:, :, part]
        scaled = weight * values.token_scale[:, :, part].float().unsqueeze(3)
        zero = weight @ values.zero_point[:, :, part].float().unsqueeze(4)
        total += ((scaled @ codes + zero) * values.channel_scale[:, :, part].float().unsqueeze(3)).sum(2)
    return total if state.config.method == "rtn" else rotate(total)


def _mask_of_parts(state: LayerState, mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask of [sinks, tiles, tail, run], and what left padding excludes; added to the scores if there is any."""
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, -torch.inf)
    if state.padding is None:
        return mask
    return _mask_behind_padding(state, state.padding, mask)


def _mask_behind_padding(state: LayerState, padding: LeftPadding, mask: torch.Tensor | None) -> torch.Tensor:
    sink, tail, length = state.config.sink_length, state.tail_start, state.length
    start = padding.length[:, None]
    position = torch.arange(length, device=start.device).expand(start.shape[0], -1)
    in_sinks = start + torch.arange(sink, device=start.device)
    behind = position[:, sink:]
    counted = torch.cat([in_sinks < tail, (behind >= start + sink) | (behind >= tail)], 1)
    full = torch.zeros(1, 1, 1, length, device=start.device) if mask is None else mask.float()
    full = full.expand(start.shape[0], -1, -1, -1)
    index = torch.cat([in_sinks.clamp_max(length - 1), behind], 1)
    bias = full.gather(3, index[:, None, None].expand(-1, *full.shape[1:3], -1))
    bias = bias.masked_fill(~counted[:, None, None], -torch.inf)
    # The run's token stands for as many keys as there are in the run before the tail: their weights add up.
    in_run = position < start.clamp_max(tail)
    run = full.masked_fill(~in_run[:, None, None], -torch.inf).logsumexp(3, keepdim=True)
    return torch.cat([bias, run], 3)


def _chunks(count: int, elements: int, most: int) -> list[slice]:
    """``count`` tiles of so many ``elements`` in slices of at most ``most`` elements."""
    step = max(1, most // max(1, elements))
    return [slice(i, min(i + step, count)) for i in range(0, count, step)]


def _store(arena: Packed, where: slice, tiles: Packed) -> None:
    for target, source in zip(arena, tiles, strict=True):
        target[:, :, where] = source
