"""Attention over packed tiles in plain torch, with every scale folded into the small operands.

Per tile, with q the rotated (and un-prescaled) query and p the softmax weights::

    score[t] = token_scale[t] * (sum_d (q[d] * channel_scale[d]) * code[t, d]  +  sum_d q[d] * zero_point[d])
    out[d]   = channel_scale[d] * (sum_t (p[t] * token_scale[t]) * code[t, d]  +  sum_t p[t] * zero_point[t])

so neither are codes scaled nor are tiles rotated back: the query is rotated once, and the output once. This is the path
of CPUs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvarn_hf.method.quantize import Packed, key_codes, value_codes
from kvarn_hf.method.rotation import rotate

if TYPE_CHECKING:
    from kvarn_hf.state.layer_state import LayerState

# Codes unpacked at a time, as float32: what fits a core's cache.
_CHUNK_ELEMENTS = 1 << 18


def attend(
    state: LayerState,
    query: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See :func:`kvarn_hf.ops.attend`; ``state`` holds at least one tile."""
    batch, query_heads, tokens, _ = query.shape
    dense_keys, dense_values = state.dense.keys.float(), state.dense.values.float()
    heads, sink = dense_keys.shape[1], state.config.sink_length
    # All queries of a KV head are rows of one matrix: [batch, heads, groups * tokens, channel].
    rows = (query.float() * scaling).reshape(batch, heads, -1, query.shape[3])
    keys, values = state.tiles.filled()

    scores = [rows @ dense_keys[:, :, :sink].mT, _tile_scores(rows, keys, state), rows @ dense_keys[:, :, sink:].mT]
    run_key, run_value = (dense_keys[:, :, :0], dense_values[:, :, :0])
    if state.padding is not None:
        run_key, run_value = state.padding.key.float(), state.padding.value.float()
        scores.append(rows @ run_key.mT)
    logits = torch.cat(scores, -1).reshape(batch, query_heads, tokens, -1)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    bias = _bias(state, mask, logits)
    if bias is not None:
        logits = logits + bias
    if sinks is not None:
        extra = sinks.float().reshape(1, -1, 1, 1).expand(batch, -1, tokens, 1)
        weights = torch.softmax(torch.cat([logits, extra], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(logits, -1)
    weights = weights.reshape(batch, heads, -1, weights.shape[-1])
    sizes = [sink, state.tail_start - sink, state.length - state.tail_start, run_key.shape[2]]
    of_sinks, of_tiles, of_tail, of_run = weights.split(sizes, -1)
    out = of_sinks @ dense_values[:, :, :sink] + of_tail @ dense_values[:, :, sink:] + of_run @ run_value
    out = out + _tile_output(of_tiles, values, state)
    return out.reshape(batch, query_heads, tokens, -1).transpose(1, 2).to(query.dtype)


def _tile_scores(rows: torch.Tensor, keys: Packed, state: LayerState) -> torch.Tensor:
    if state.prescale is not None:
        rows = rows / state.prescale.float().unsqueeze(2)
    if state.config.method != "rtn":
        rows = rotate(rows)
    out = rows.new_empty(*rows.shape[:3], state.count, state.config.tile_size)
    for part in _chunks(state.count, keys.codes, state.config.key_bits):
        # [batch, heads, tile, token, channel]
        codes = key_codes(keys.codes[:, :, part], state.config.key_bits)
        scaled = rows.unsqueeze(2) * keys.channel_scale[:, :, part].float().unsqueeze(3)
        zero = (keys.zero_point[:, :, part].float() @ rows.mT).mT.unsqueeze(4)  # [batch, heads, row, tile, 1]
        products = (scaled @ codes.mT).transpose(2, 3)
        out[:, :, :, part] = (products + zero) * keys.token_scale[:, :, None, part].float()
    return out.flatten(3)


def _tile_output(weights: torch.Tensor, values: Packed, state: LayerState) -> torch.Tensor:
    weights = weights.unflatten(3, (state.count, -1)).transpose(2, 3)  # [batch, heads, tile, row, token]
    total = weights.new_zeros(*weights.shape[:2], weights.shape[3], values.channel_scale.shape[3])
    for part in _chunks(state.count, values.codes, state.config.value_bits):
        codes = value_codes(values.codes[:, :, part], state.config.value_bits)
        weight = weights[:, :, part]
        scaled = weight * values.token_scale[:, :, part].float().unsqueeze(3)
        zero = weight @ values.zero_point[:, :, part].float().unsqueeze(4)
        total += ((scaled @ codes + zero) * values.channel_scale[:, :, part].float().unsqueeze(3)).sum(2)
    return total if state.config.method == "rtn" else rotate(total)


def _bias(state: LayerState, mask: torch.Tensor | None, logits: torch.Tensor) -> torch.Tensor | None:
    """What is added to the logits of [sinks, tiles, tail, run]: the mask, and what left padding excludes."""
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.finfo(logits.dtype).min)
    elif mask is not None:
        mask = mask.float().clamp_min(torch.finfo(logits.dtype).min)  # a query that sees nothing must not become NaN
    if state.padding is None:
        return mask
    sink, tail, length = state.config.sink_length, state.tail_start, state.length
    start = state.padding.length[:, None]
    position = torch.arange(length, device=logits.device).expand(start.shape[0], -1)
    in_sinks = start + torch.arange(sink, device=logits.device)
    slot = torch.cat([in_sinks.clamp_max(length - 1), position[:, sink:]], 1)
    behind = position[:, sink:]
    counted = torch.cat([in_sinks < tail, (behind >= start + sink) | (behind >= tail)], 1)
    in_run = position < start  # [batch, length]
    full = logits.new_zeros(1, 1, 1, length) if mask is None else mask
    full = full.expand(start.shape[0], -1, -1, -1)
    bias = full.gather(3, slot[:, None, None].expand(-1, *full.shape[1:3], -1))
    bias = bias.masked_fill(~counted[:, None, None], -torch.inf)
    # The run's token stands for as many keys as there are in the run: their weights add up.
    run = full.masked_fill(~in_run[:, None, None], -torch.inf).logsumexp(3, keepdim=True)
    return torch.cat([bias, run], 3)


def _chunks(count: int, codes: torch.Tensor, bits: int) -> list[slice]:
    step = max(1, _CHUNK_ELEMENTS * bits // 8 // max(1, codes[:, :, 0].numel()))
    return [slice(i, min(i + step, count)) for i in range(0, count, step)]
