"""A few figures about packed tiles, from their tokens as they were given and from what is stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

from kvarn_hf import ops
from kvarn_hf.config import KVarNConfig
from kvarn_hf.method.errors import token_errors
from kvarn_hf.method.quantize import Packed, dequantize_keys, dequantize_values, rotated_tile

if TYPE_CHECKING:
    from kvarn_hf.state.layer_state import LayerState

SIDES = ("keys", "values")
ERRORS = ("relative_error", "magnitude_error", "direction_error")
IMBALANCES = ("imbalance_before", "imbalance_after")
FIGURES = (*ERRORS, "worst_token_error", "worst_token", "iterations", *IMBALANCES, "prescale")


class PackedTokens(NamedTuple):
    """Tiles ``[batch, heads, tiles, ...]``: their tokens as given and as stored.

    ``counted`` ``[batch, 1, tiles, tile_size]`` says which tokens are no padding.
    """

    keys: torch.Tensor
    values: torch.Tensor
    stored_keys: Packed
    stored_values: Packed
    prescale: torch.Tensor | None
    counted: torch.Tensor | None

    @classmethod
    def of(cls, before: LayerState, after: LayerState, tiles: range) -> PackedTokens:
        """Tiles that ``after`` has packed and ``before`` holds dense."""
        config = after.config
        size, sink = config.tile_size, config.sink_length
        begin, end = ((tile - before.count) * size + sink for tile in (tiles[0], tiles[-1] + 1))  # in the dense buffer
        position = sink + tiles[0] * size
        first = None if after.padding is None else after.padding.length + sink

        def original(x: torch.Tensor) -> torch.Tensor:
            x = x[:, :, begin:end]
            x = x if first is None else ops.repeat_counted(x, first - position, size)
            return x.unflatten(2, (-1, size))[:, :, :: tiles.step]

        def stored(arena: Packed) -> Packed:
            return Packed(*(t[:, :, tiles[0] : tiles[-1] + 1 : tiles.step] for t in arena))

        prescale, counted = after.prescale, None
        if prescale is not None:
            prescale = prescale.unsqueeze(2).expand(-1, -1, len(tiles), -1)
        if first is not None:
            token = torch.arange(size, device=first.device)
            start = torch.arange(tiles.start, tiles.stop, tiles.step, device=first.device) * size + sink
            counted = (start[:, None] + token >= first[:, None, None])[:, None]
        dense, held = before.dense, after.tiles
        return cls(
            original(dense.keys), original(dense.values), stored(held.keys), stored(held.values), prescale, counted
        )

    @classmethod
    def joined(cls, parts: Sequence[PackedTokens]) -> PackedTokens:
        """All tiles of parts that :meth:`fits` says fit."""
        if len(parts) == 1:
            return parts[0]
        return tree_map(lambda *tensors: None if tensors[0] is None else torch.cat(tensors, 2), *parts)

    def fits(self, other: PackedTokens) -> bool:
        """Whether the two can be joined."""
        return self._form() == other._form()

    def _form(self) -> tuple[object, ...]:
        return tuple(t if t is None else (t.dtype, t.device, *t.shape[:2], *t.shape[3:]) for t in tree_leaves(self))


def figures_of(tokens: PackedTokens, config: KVarNConfig, most_rounds: int, tolerance: float) -> torch.Tensor:
    """:data:`FIGURES` of every tile and side: ``[batch, heads, tiles, len(SIDES), len(FIGURES)]``, float32; NaN for
    tiles of padding alone.

    ``most_rounds`` of normalization are followed, and a change of the imbalance by less than ``tolerance`` of it counts
    as none.
    """
    keys, values, stored_keys, stored_values, prescale, counted = tokens
    keys_hat = dequantize_keys(stored_keys, prescale, config)
    values_hat = dequantize_values(stored_values, config)
    key_tile, key_exponent, key_broken = rotated_tile(keys, prescale, config)
    value_tile, value_exponent, value_broken = rotated_tile(values, None, config)
    rounds = most_rounds, tolerance
    none = torch.ones(keys.shape[:3], dtype=torch.float32, device=keys.device)
    strength = none if prescale is None else prescale.float().amax(-1) / prescale.float().amin(-1)
    found = (
        (_errors(keys, keys_hat, ~key_broken, counted), _rounds(key_tile.mT, key_exponent, config, *rounds), strength),
        (
            _errors(values, values_hat, ~value_broken, counted),
            _rounds(value_tile, value_exponent, config, *rounds),
            none,
        ),
    )
    out = torch.stack([torch.stack((*errors, *trace, last), -1) for errors, trace, last in found], -2)
    return out if counted is None else out.masked_fill(~counted.any(-1)[..., None, None], torch.nan)


def _errors(
    x: torch.Tensor, x_hat: torch.Tensor, known: torch.Tensor, counted: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """Relative, magnitude and direction error of every tile, its worst token's error and that token's index."""
    ignored = ~(known if counted is None else known & counted)[..., None]
    x, x_hat = x.float().masked_fill(ignored, 0.0), x_hat.masked_fill(ignored, 0.0)
    largest = x.abs().amax((-2, -1), keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    x = x / largest  # squares of anything fit
    errors = token_errors(x, x_hat / largest)
    energy = x.square().sum((-2, -1)).clamp_min(torch.finfo(torch.float32).tiny)
    parts = (errors.magnitude + errors.direction, errors.magnitude, errors.direction)
    worst, token = errors.relative.max(-1)
    return *((part.sum(-1) / energy).sqrt() for part in parts), worst, token.float()


def _rounds(
    matrix: torch.Tensor, exponent: torch.Tensor, config: KVarNConfig, most_rounds: int, tolerance: float
) -> tuple[torch.Tensor, ...]:
    """Rounds until the imbalance of ``[..., rows, columns]`` stays, and the imbalance before and after the method's."""
    published = config.method == "published"
    if published:  # as in quantizing: its clamps are absolute
        matrix = matrix * torch.exp2(exponent.float())
    trace = ops.imbalance_trace(matrix, max(most_rounds, config.iterations), relative=not published)
    moves = trace.diff(dim=-1).abs() > tolerance * trace[..., :-1]
    rounds = (moves * torch.arange(1, trace.shape[-1], device=trace.device)).amax(-1)  # the last that moved it
    # The published method takes the best of all states.
    after = trace[..., : config.iterations + 1].amin(-1) if published else trace[..., config.iterations]
    return rounds.float(), trace[..., 0], after
