"""Packs the tiles that are due: once, from the original tokens."""

from __future__ import annotations

import torch

from kvarn_hf.ops import dispatch
from kvarn_hf.state.dense import DenseTokens
from kvarn_hf.state.layer_state import LayerState
from kvarn_hf.state.padding import LeftPadding, gather_tokens


def commit(state: LayerState) -> LayerState:
    """The state with every tile that is due packed.

    Due are the whole tiles behind the sinks and before the newest ``residual_length`` tokens. What a tile becomes
    depends on its tokens and on the sequence's pre-scale alone, however many are packed at once.
    """
    config, dense, count = state.config, state.dense, state.count
    due = config.packed_tiles(state.length) - count
    if due <= 0:
        return state
    sink, start = config.sink_length, config.sink_length + state.packed
    end = sink + due * config.tile_size  # in the dense buffer
    keys, values = dense.keys, dense.values
    padding, first = left_padding(state), None
    sinks = keys[:, :, :sink], values[:, :, :sink]
    if padding is not None:
        first, sinks = padding.length + sink, padding.sinks(dense, state.packed, sink)
    prescale = _prescale(state, first, start + due * config.tile_size)
    tiles = state.tiles.reserved(due)
    dispatch.quantize(keys[:, :, sink:end], values[:, :, sink:end], prescale, tiles, config, start, first)
    tiles.written[0] = count + due
    kept_keys, kept_values = (
        torch.cat([head, x[:, :, end:]], 2) for head, x in zip(sinks, (keys, values), strict=True)
    )
    dense = DenseTokens.copied(kept_keys, kept_values)
    return LayerState(config, dense, tiles.truncated(count + due), prescale, padding)


def left_padding(state: LayerState) -> LeftPadding | None:
    """Where each row begins, every token looked at; None for a single row, which alone is never padded."""
    padding = state.padding
    if padding is None:
        if state.count or state.batch == 1 or state.length == 0:
            return None
        padding = LeftPadding.begin(state.dense)
    return padding.scanned_to(state.dense, state.packed)


def _prescale(state: LayerState, first: torch.Tensor | None, end: int) -> torch.Tensor | None:
    """The keys' channel factors, of rows whose first tile ends before position ``end``."""
    config, dense = state.config, state.dense
    if config.method != "kvarn":
        return None
    sink, size = config.sink_length, config.tile_size
    if first is None:
        return dispatch.key_prescale(dense.keys[:, :, sink : sink + size]) if state.count == 0 else state.prescale
    # Each row's own first tile begins behind its own sinks, wherever its padding ended. It is cut where the tail may
    # end when the row's first tokens are packed: the factors must not depend on how many tokens came at once.
    start = sink + state.packed
    ahead = size - (first - start) % size + config.residual_length
    span = ahead.clamp_max(size)[:, None]
    position = first[:, None] + torch.arange(size, device=first.device) % span
    index = (position - start + sink).clamp(0, dense.length - 1)
    fresh = dispatch.key_prescale(gather_tokens(dense.keys, index))
    known = torch.ones_like(fresh) if state.prescale is None else state.prescale
    begins_here = (first >= start) & (first < end)
    return torch.where(begins_here[:, None, None], fresh, known)
