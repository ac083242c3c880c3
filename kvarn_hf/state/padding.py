"""Left padding: a run of identical tokens at a row's start is stored once, and the row's sinks begin behind it.

The cache is not told which tokens are padding. But padding tokens of one row have the same embedding and the same
position, so their keys and values are equal, bit for bit. Storing such a run once loses nothing, whatever its tokens
mean, and lets every row of a padded batch have its own sinks and its own pre-scale, as it has when it runs alone.

    position    0 .. length  |  length .. length + sink_length  |  ...
    read as     one token    |  the row's sinks                 |  tiles, then the tail
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvarn_hf.state.dense import DenseTokens


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
    def begin(cls, dense: DenseTokens) -> LeftPadding:
        """From all tokens so far, of which only the first has been looked at."""
        run = torch.ones(dense.keys.shape[0], dtype=torch.int64, device=dense.keys.device)
        return cls(run, 1, dense.keys[:, :, :1].clone(), dense.values[:, :, :1].clone())

    @property
    def length(self) -> torch.Tensor:
        """``[batch]``, int64: tokens of padding; a single first token is no run."""
        return torch.where(self.run > 1, self.run, 0)

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """Every tensor held, by name."""
        return {"padding.run": self.run, "padding.key": self.key, "padding.value": self.value}

    def with_parts(self, parts: dict[str, torch.Tensor]) -> LeftPadding:
        """The same padding in other tensors, named as :attr:`parts` names them."""
        return replace(self, run=parts["padding.run"], key=parts["padding.key"], value=parts["padding.value"])

    def scanned_to(self, dense: DenseTokens, packed: int) -> LeftPadding:
        """With every dense token looked at; ``packed`` tokens before the tail are in tiles."""
        new = slice(self.scanned - packed, dense.length)
        equal = (dense.keys[:, :, new] == self.key).all(-1).all(1)
        equal &= (dense.values[:, :, new] == self.value).all(-1).all(1)
        more = equal.to(torch.int64).cumprod(1).sum(1)
        run = torch.where(self.run == self.scanned, self.run + more, self.run)
        return replace(self, run=run, scanned=dense.length + packed)

    def sinks(self, dense: DenseTokens, packed: int, sink_length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[batch, heads, sink_length, head_dim]`` of each row's first tokens behind its padding.

        Those that are not there yet are zero, and filled in by a later call, while they are still dense.
        """
        slot = torch.arange(sink_length, device=self.run.device)
        position = self.length[:, None] + slot
        tail_start = sink_length + packed if packed else 0
        index = torch.where(position >= tail_start, position - packed, slot).clamp(0, dense.length - 1)
        missing = (position >= dense.length + packed)[:, None, :, None]
        keys, values = (gather_tokens(x, index).masked_fill(missing, 0) for x in (dense.keys, dense.values))
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


def gather_tokens(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``x[b, :, index[b, i], :]`` for ``x`` ``[batch, heads, tokens, head_dim]`` and ``index`` ``[batch, n]``."""
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
