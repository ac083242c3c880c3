"""Storage for the packed tiles of one layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kvarn_hf.config import KVarNConfig
from kvarn_hf.method.quantize import Packed


def capacity_for(count: int) -> int:
    """Tiles to allocate for ``count`` of them: at most an eighth more, and a pure function of the count.

    Growth is geometric (the step doubles whenever the count does), so appending costs a bounded number of copies per
    tile, and two caches that hold the same tokens hold the same bytes, however the tokens came in.

    >>> [capacity_for(n) for n in (1, 15, 17, 30, 31, 100)]
    [1, 15, 18, 30, 32, 104]
    """
    step = 1 << max(0, count.bit_length() - 4)
    return -(-count // step) * step


@dataclass(frozen=True)
class PackedTiles:
    """Codes and scales of one layer's tiles, in arenas ``[rows, heads, capacity, ...]`` of which ``count`` are filled.

    Filled slots never change, so a state that was taken earlier stays valid while later tiles are appended behind it.

    Parameters
    ----------
    keys, values : Packed
        The arenas.
    count : int
        Tiles in use.
    rows : torch.Tensor, optional
        ``[batch]``, int64: the arena row of every batch row; None means each its own. Beam search re-maps rows at every
        step, and moving the map is cheaper than moving tiles.
    """

    keys: Packed
    values: Packed
    count: int
    rows: torch.Tensor | None = None

    @classmethod
    def allocate(
        cls, batch: int, heads: int, key_dim: int, value_dim: int, config: KVarNConfig, count: int, device: torch.device
    ) -> PackedTiles:
        """Uninitialized arenas with room for ``count`` tiles, none filled."""
        size, capacity = config.tile_size, capacity_for(count)

        def arena(codes: tuple[int, int], channels: int, zero_points: int) -> Packed:
            lead = (batch, heads, capacity)
            half = [torch.empty(*lead, n, dtype=torch.float16, device=device) for n in (channels, size, zero_points)]
            return Packed(torch.empty(*lead, *codes, dtype=torch.uint8, device=device), *half)

        keys = arena((size * config.key_bits // 8, key_dim), key_dim, key_dim)
        values = arena((value_dim * config.value_bits // 8, size), value_dim, size)
        return cls(keys, values, 0)

    def emptied(self) -> PackedTiles:
        """No tiles, and no memory for any."""
        batch = self.keys.codes.shape[0] if self.rows is None else self.rows.shape[0]
        keys, values = (
            Packed(*(t.new_empty(batch, t.shape[1], 0, *t.shape[3:]) for t in part)) for part in self._parts
        )
        return PackedTiles(keys, values, 0)

    @property
    def _parts(self) -> tuple[Packed, Packed]:
        return self.keys, self.values

    @property
    def capacity(self) -> int:
        return self.keys.codes.shape[2]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Every tensor held."""
        return (*self.keys, *self.values) if self.rows is None else (*self.keys, *self.values, self.rows)

    def reserved(self, extra: int) -> PackedTiles:
        """With room for ``extra`` more tiles, every batch row having its own arena row."""
        tiles = self.with_own_rows()
        if self.count + extra <= self.capacity:
            return tiles
        capacity = capacity_for(self.count + extra)

        def grow(tensor: torch.Tensor) -> torch.Tensor:
            grown = tensor.new_empty(*tensor.shape[:2], capacity, *tensor.shape[3:])
            grown[:, :, : self.count] = tensor[:, :, : self.count]
            return grown

        return replace(tiles, keys=Packed(*map(grow, tiles.keys)), values=Packed(*map(grow, tiles.values)))

    def truncated(self, count: int) -> PackedTiles:
        """The first ``count`` tiles; the arenas keep their size."""
        return replace(self, count=count)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PackedTiles:
        """With every tensor changed, e.g. moved to another device."""
        keys, values = (Packed(*map(change, part)) for part in self._parts)
        return replace(self, keys=keys, values=values, rows=None if self.rows is None else change(self.rows))

    def select(self, indices: torch.Tensor) -> PackedTiles:
        """Batch rows ``indices`` (int64, repeats allowed) by re-mapping; no tile moves."""
        return replace(self, rows=indices if self.rows is None else self.rows.index_select(0, indices))

    def with_own_rows(self) -> PackedTiles:
        """With every batch row in an arena row of its own, as appending needs."""
        if self.rows is None:
            return self
        keys, values = (Packed(*(t.index_select(0, self.rows) for t in part)) for part in self._parts)
        return replace(self, keys=keys, values=values, rows=None)

    def filled(self) -> tuple[Packed, Packed]:
        """Keys and values of the tiles in use, ``[batch, heads, count, ...]``."""
        keys, values = (Packed(*(t[:, :, : self.count] for t in part)) for part in self.with_own_rows()._parts)
        return keys, values
