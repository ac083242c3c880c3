"""Left padding: a run of identical tokens at a row's start is stored once, and the row's sinks begin behind it.

The cache is not told which tokens are padding. But padding tokens of one row have the same embedding and the same
position, so their keys and values are equal, bit for bit. Storing such a run once loses nothing, whatever its tokens
mean, and lets every row of a padded batch have its own sinks and its own pre-scale, as it has when it runs alone.

    position    0 .. length  |  length .. length + sink_length  |  ...
    read as     one token    |  the row's sinks                 |  tiles, then the tail
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from kvarn_hf.state.layer_state import LayerState


@dataclass(frozen=True)
class LeftPadding:
    """The run of identical tokens at each row's start.

    Parameters
    ----------
    run : torch.Tensor
        ``[batch]``, int64: tokens equal to the row's first, at least 1.
    scanned : int
        Tokens looked at so far; a row whose run is that long may go on.
    key, value : torch.Tensor
        ``[batch, heads, 1, head_dim]``: the row's first token.
    """

    run: torch.Tensor
    scanned: int
    key: torch.Tensor
    value: torch.Tensor

    @classmethod
    def begin(cls, keys: torch.Tensor, values: torch.Tensor) -> LeftPadding:
        """From all tokens so far, of which only the first has been looked at."""
        run = torch.ones(keys.shape[0], dtype=torch.int64, device=keys.device)
        return cls(run, 1, keys[:, :, :1].clone(), values[:, :, :1].clone())

    @property
    def length(self) -> torch.Tensor:
        """``[batch]``, int64: tokens of padding; a single first token is no run."""
        return torch.where(self.run > 1, self.run, 0)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Every tensor held."""
        return self.run, self.key, self.value

    def scanned_to(self, state: LayerState) -> LeftPadding:
        """With every token of ``state`` looked at."""
        new = slice(_dense_index(state, self.scanned), state.dense.length)
        equal = (state.dense.keys[:, :, new] == self.key).all(-1).all(1)
        equal &= (state.dense.values[:, :, new] == self.value).all(-1).all(1)
        more = equal.to(torch.int64).cumprod(1).sum(1)
        run = torch.where(self.run == self.scanned, self.run + more, self.run)
        return replace(self, run=run, scanned=state.length)

    def sinks(self, state: LayerState) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[batch, heads, sink_length, head_dim]`` of each row's first tokens behind its padding.

        Those that are not there yet are zero, and filled in by a later call, while they are still dense.
        """
        slot = torch.arange(state.config.sink_length, device=self.run.device)
        position = self.length[:, None] + slot
        held = position >= state.tail_start
        index = torch.where(held, _dense_index(state, position), slot).clamp(0, state.dense.length - 1)
        missing = (position >= state.length)[:, None, :, None]
        keys, values = (gather_tokens(x, index).masked_fill(missing, 0) for x in (state.dense.keys, state.dense.values))
        return keys, values

    def restored(
        self, keys: torch.Tensor, sinks: torch.Tensor, run_token: torch.Tensor, tail_start: int
    ) -> torch.Tensor:
        """``keys`` (or values), read as if no row were padded, with runs and sinks put where they belong.

        Parameters
        ----------
        keys : torch.Tensor
            ``[batch, heads, tokens, head_dim]``.
        sinks, run_token : torch.Tensor
            ``[batch, heads, sink_length, head_dim]`` and ``[batch, heads, 1, head_dim]``.
        tail_start : int
            Tokens from here on are dense and right as they are.
        """
        head = keys[:, :, :tail_start]
        position = torch.arange(tail_start, device=keys.device)
        slot = position - self.length[:, None]
        sink = gather_tokens(sinks, slot.clamp(0, sinks.shape[2] - 1)) if sinks.shape[2] else head
        in_sink = ((slot >= 0) & (slot < sinks.shape[2]))[:, None, :, None]
        in_run = (slot < 0)[:, None, :, None]
        head = torch.where(in_run, run_token, torch.where(in_sink, sink, head))
        return torch.cat([head, keys[:, :, tail_start:]], 2)

    def shortened(self, length: int) -> LeftPadding:
        """As it was for the first ``length`` tokens."""
        return replace(self, run=self.run.clamp_max(max(1, length)), scanned=min(self.scanned, max(1, length)))

    def index_select(self, indices: torch.Tensor) -> LeftPadding:
        """Batch rows ``indices``."""
        run, key, value = (t.index_select(0, indices) for t in self.tensors)
        return replace(self, run=run, key=key, value=value)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> LeftPadding:
        """With every tensor changed, e.g. moved to another device."""
        run, key, value = map(change, self.tensors)
        return replace(self, run=run, key=key, value=value)


def _dense_index(state: LayerState, position: Any) -> Any:
    """Where a position of the tail (or, before anything is packed, any position) lies in the dense buffer."""
    return position - state.tail_start + (state.config.sink_length if state.count else 0)


def gather_tokens(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``x[b, :, index[b, i], :]`` for ``x`` ``[batch, heads, tokens, head_dim]`` and ``index`` ``[batch, n]``."""
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
