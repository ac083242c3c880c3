"""What one layer stores after n tokens, as an immutable value: sinks and tail dense, everything between them packed.

    position   0 .. sink | sink .. sink + count * tile_size | .. length
    stored     dense     | packed tiles                     | dense

Every change makes a new state and leaves the old one valid, so an update that fails half-way has changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kvarn_hf import ops
from kvarn_hf.config import KVarNConfig
from kvarn_hf.state.padding import LeftPadding, gather_tokens
from kvarn_hf.state.tiles import PackedTiles

# Dense buffers grow by this many tokens, so that most decode steps append in place.
_GRANULE = 32


@dataclass(frozen=True)
class DenseTokens:
    """Keys and values of the dense tokens: buffers ``[batch, heads, capacity, head_dim]``, ``length`` of it in use."""

    key_buffer: torch.Tensor
    value_buffer: torch.Tensor
    length: int

    @classmethod
    def copied(cls, keys: torch.Tensor, values: torch.Tensor, room: int = 0) -> DenseTokens:
        """A copy in buffers of its own, with room for ``room`` more tokens."""
        length = keys.shape[2]
        capacity = -(-(length + room) // _GRANULE) * _GRANULE

        def copy(x: torch.Tensor) -> torch.Tensor:
            buffer = x.new_empty(*x.shape[:2], capacity, x.shape[3])
            buffer[:, :, :length] = x
            return buffer

        return cls(copy(keys), copy(values), length)

    @property
    def keys(self) -> torch.Tensor:
        return self.key_buffer[:, :, : self.length]

    @property
    def values(self) -> torch.Tensor:
        return self.value_buffer[:, :, : self.length]

    def appended(self, keys: torch.Tensor, values: torch.Tensor) -> DenseTokens:
        """With more tokens behind these; written in place where the buffers have room."""
        length = self.length + keys.shape[2]
        target = self
        if length > self.key_buffer.shape[2]:
            target = DenseTokens.copied(self.keys, self.values, room=keys.shape[2])
        target.key_buffer.narrow(2, self.length, keys.shape[2]).copy_(keys)
        target.value_buffer.narrow(2, self.length, keys.shape[2]).copy_(values)
        return replace(target, length=length)

    def index_select(self, indices: torch.Tensor) -> DenseTokens:
        """Batch rows ``indices``."""
        return replace(
            self,
            key_buffer=self.key_buffer.index_select(0, indices),
            value_buffer=self.value_buffer.index_select(0, indices),
        )


@dataclass(frozen=True)
class LayerState:
    """The tokens of one layer.

    Parameters
    ----------
    config : KVarNConfig
    dense : DenseTokens
        While nothing is packed: all tokens. Then: the sinks, followed by the tail.
    tiles : PackedTiles
        The packed tokens between sinks and tail.
    prescale : torch.Tensor, optional
        ``[batch, heads, key_dim]``, float16: the keys' channel factors, fixed by the first tile that is packed.
    padding : LeftPadding, optional
        Where each row of a batch begins; None while nothing is packed, and for a single row.
    """

    config: KVarNConfig
    dense: DenseTokens
    tiles: PackedTiles
    prescale: torch.Tensor | None = None
    padding: LeftPadding | None = None

    @classmethod
    def empty(cls, config: KVarNConfig, keys: torch.Tensor, values: torch.Tensor) -> LayerState:
        """No tokens yet, for keys and values like the ones given."""
        # Fresh storage: a view of the first prompt would keep all of it alive.
        key_buffer, value_buffer = (x.new_empty(*x.shape[:2], 0, x.shape[3]) for x in (keys, values))
        shape = (keys.shape[0], keys.shape[1], keys.shape[3], values.shape[3])
        tiles = PackedTiles.allocate(*shape, config, 0, keys.device)
        return cls(config, DenseTokens(key_buffer, value_buffer, 0), tiles)

    @property
    def count(self) -> int:
        """Tiles packed."""
        return self.tiles.count

    @property
    def length(self) -> int:
        """Tokens held."""
        return self.dense.length + self.count * self.config.tile_size

    @property
    def tail_start(self) -> int:
        """Position of the first dense token behind the tiles (0 while nothing is packed)."""
        return self.config.sink_length + self.count * self.config.tile_size if self.count else 0

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Every tensor held."""
        return (
            self.dense.key_buffer,
            self.dense.value_buffer,
            *self.tiles.tensors,
            *(() if self.prescale is None else (self.prescale,)),
            *(() if self.padding is None else self.padding.tensors),
        )

    def appended(self, keys: torch.Tensor, values: torch.Tensor) -> LayerState:
        """With more tokens in the tail, and nothing packed yet: what attention reads in this step."""
        keys, values = keys.detach(), values.detach()
        length = self.length + keys.shape[2]
        if self.config.packed_tiles(length) <= self.count:
            return replace(self, dense=self.dense.appended(keys, values))
        # Most of this is about to be packed: a whole prompt is not copied for that.
        if self.dense.length:
            keys = torch.cat([self.dense.keys, keys], 2)
            values = torch.cat([self.dense.values, values], 2)
        return replace(self, dense=DenseTokens(keys, values, keys.shape[2]))

    def committed(self) -> LayerState:
        """With every tile that is due packed: once, from the original values."""
        config, dense, count = self.config, self.dense, self.count
        due = config.packed_tiles(self.length) - count
        if due <= 0:
            return self
        sink, start = config.sink_length, config.sink_length + count * config.tile_size
        end = sink + due * config.tile_size  # in the dense buffer
        keys, values = dense.keys, dense.values
        padding = self.padding
        if padding is None and keys.shape[0] > 1 and count == 0:
            padding = LeftPadding.begin(keys, values)
        if padding is None:
            first, sink_keys, sink_values = None, keys[:, :, :sink], values[:, :, :sink]
        else:
            padding = padding.scanned_to(self)
            first = padding.length + sink
            sink_keys, sink_values = padding.sinks(self)
        prescale = self._prescale(first, start + due * config.tile_size)
        tiles = self.tiles.reserved(due)
        ops.quantize(keys[:, :, sink:end], values[:, :, sink:end], prescale, tiles, config, start, first)
        tail = DenseTokens.copied(
            torch.cat([sink_keys, keys[:, :, end:]], 2), torch.cat([sink_values, values[:, :, end:]], 2)
        )
        return LayerState(config, tail, tiles.truncated(count + due), prescale, padding)

    def cropped(self, length: int) -> LayerState:
        """With only the first ``length`` tokens, each as it was.

        Raises
        ------
        ValueError
            If the cut would go through a packed tile, whose tokens share their scales.
        """
        length = max(0, length)
        config, dense = self.config, self.dense
        sink, size = config.sink_length, config.tile_size
        if length >= self.length:
            return self
        if length >= self.tail_start:
            head = min(sink, dense.length) if self.count else 0
            return self._shortened(length, replace(dense, length=head + length - self.tail_start), self.tiles)
        if length <= sink:
            if self.padding is not None:
                # The rows' sinks begin behind their padding: put both back where they belong.
                keys, values = dense.keys[:, :, :sink], dense.values[:, :, :sink]
                keys = self.padding.restored(keys, keys, self.padding.key, sink)
                values = self.padding.restored(values, values, self.padding.value, sink)
                dense = DenseTokens.copied(keys, values)
            return LayerState(config, replace(dense, length=length), self.tiles.emptied())
        if (length - sink) % size:
            below = length - (length - sink) % size
            raise ValueError(
                f"crop to {length} tokens would cut through a packed tile; allowed are 0 to {sink}, "
                f"{below}, {below + size} (or any other whole tile) and {self.tail_start} to {self.length}"
            )
        return self._shortened(length, replace(dense, length=sink), self.tiles.truncated((length - sink) // size))

    def index_select(self, indices: torch.Tensor) -> LayerState:
        """Batch rows ``indices`` (int64, repeats allowed); tiles are re-mapped, not moved."""
        return LayerState(
            self.config,
            self.dense.index_select(indices),
            self.tiles.select(indices),
            None if self.prescale is None else self.prescale.index_select(0, indices),
            None if self.padding is None else self.padding.index_select(indices),
        )

    def compacted(self) -> LayerState:
        """With no arena row that no batch row uses."""
        return replace(self, tiles=self.tiles.with_own_rows())

    def to(self, device: torch.device | str) -> LayerState:
        """On another device."""
        return self._map(lambda t: t.to(device, non_blocking=True))

    def writable(self) -> LayerState:
        """With no tensor from ``torch.inference_mode``, which could not be appended to outside of it."""
        if torch.is_inference_mode_enabled() or not any(t.is_inference() for t in self.tensors):
            return self
        return self._map(torch.clone)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> LayerState:
        dense = replace(
            self.dense, key_buffer=change(self.dense.key_buffer), value_buffer=change(self.dense.value_buffer)
        )
        return LayerState(
            self.config,
            dense,
            self.tiles.map(change),
            None if self.prescale is None else change(self.prescale),
            None if self.padding is None else self.padding.map(change),
        )

    def _shortened(self, length: int, dense: DenseTokens, tiles: PackedTiles) -> LayerState:
        padding = None if self.padding is None else self.padding.shortened(length)
        return replace(self, dense=dense, tiles=tiles, padding=padding)

    def _prescale(self, first: torch.Tensor | None, end: int) -> torch.Tensor | None:
        """The keys' channel factors, of rows whose first tile ends before position ``end``."""
        config = self.config
        if config.method != "kvarn":
            return None
        sink, size = config.sink_length, config.tile_size
        if first is None:
            return ops.key_prescale(self.dense.keys[:, :, sink : sink + size]) if self.count == 0 else self.prescale
        # Each row's own first tile begins behind its own sinks, wherever its padding ended. It is cut where the tail
        # may end when the row's first tokens are packed: the factors must not depend on how many tokens came at once.
        start = sink + self.count * size
        ahead = size - (first - start) % size + config.residual_length
        span = ahead.clamp_max(size)[:, None]
        position = first[:, None] + torch.arange(size, device=first.device) % span
        index = (position - start + sink).clamp(0, self.dense.length - 1)
        fresh = ops.key_prescale(gather_tokens(self.dense.keys, index))
        known = torch.ones_like(fresh) if self.prescale is None else self.prescale
        begins_here = (first >= start) & (first < end)
        return torch.where(begins_here[:, None, None], fresh, known)
