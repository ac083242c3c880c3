"""What one layer stores after n tokens, as an immutable value: sinks and tail dense, everything between them packed.

    position   0 .. sink | sink .. sink + count * tile_size | .. length
    stored     dense     | packed tiles                     | dense

Every change makes a new state and leaves the old one valid, so an update that fails half-way has changed nothing.
Packing the tiles that are due is :func:`kvarn_hf.ops.commit`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kvarn_hf.config import KVarNConfig
from kvarn_hf.state.dense import DenseTokens
from kvarn_hf.state.padding import LeftPadding
from kvarn_hf.state.tiles import PackedTiles


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
        """No tokens yet, for keys and values like the ones given, ``[batch, heads, tokens, head_dim]``."""
        # Fresh storage: a view of the first prompt would keep all of it alive.
        empty_keys, empty_values = (x.new_empty(*x.shape[:2], 0, x.shape[3]) for x in (keys, values))
        shape = (keys.shape[0], keys.shape[1], keys.shape[3], values.shape[3])
        tiles = PackedTiles.allocate(*shape, config, 0, keys.device)
        return cls(config, DenseTokens.of(empty_keys, empty_values), tiles)

    @property
    def count(self) -> int:
        """Tiles packed."""
        return self.tiles.count

    @property
    def packed(self) -> int:
        """Tokens in packed tiles."""
        return self.count * self.config.tile_size

    @property
    def length(self) -> int:
        """Tokens held."""
        return self.dense.length + self.packed

    @property
    def tail_start(self) -> int:
        """Position of the first dense token behind the tiles (0 while nothing is packed)."""
        return self.config.sink_length + self.packed if self.count else 0

    @property
    def batch(self) -> int:
        """Rows."""
        return self.dense.key_buffer.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the tokens are."""
        return self.dense.key_buffer.device

    @property
    def token_bytes(self) -> int:
        """Bytes that a token of every row takes unquantized."""
        keys, values = self.dense.key_buffer, self.dense.value_buffer
        return sum(x.shape[0] * x.shape[1] * x.shape[3] * x.element_size() for x in (keys, values))

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """Every tensor held, by the name under which it is stored everywhere."""
        return {
            **self.dense.parts,
            **self.tiles.parts,
            **({} if self.prescale is None else {"prescale": self.prescale}),
            **({} if self.padding is None else self.padding.parts),
        }

    def with_parts(self, parts: dict[str, torch.Tensor]) -> LayerState:
        """The same state in other tensors, named as :attr:`parts` names them."""
        padding = None if self.padding is None else self.padding.with_parts(parts)
        tiles = PackedTiles.of(parts, self.count)
        return LayerState(self.config, self.dense.with_parts(parts), tiles, parts.get("prescale"), padding)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> LayerState:
        """With every tensor changed, e.g. moved to another device."""
        return self.with_parts({name: change(tensor) for name, tensor in self.parts.items()})

    def appended(self, keys: torch.Tensor, values: torch.Tensor) -> LayerState:
        """With more tokens in the tail, and nothing packed yet: what attention reads in this step."""
        keys, values = keys.detach(), values.detach()
        if self.config.packed_tiles(self.length + keys.shape[2]) <= self.count:
            return replace(self, dense=self.dense.appended(keys, values))
        # Most of this is about to be packed: a whole prompt is not copied for that.
        if self.dense.length:
            keys = torch.cat([self.dense.keys, keys], 2)
            values = torch.cat([self.dense.values, values], 2)
        return replace(self, dense=DenseTokens.of(keys, values))

    def cropped(self, length: int) -> LayerState:
        """With only the first ``length`` tokens, each as it was.

        Raises
        ------
        ValueError
            If the cut would go through a packed tile, whose tokens share their scales.
        """
        length, sink, size = max(0, length), self.config.sink_length, self.config.tile_size
        if length >= self.length:
            return self
        if length >= self.tail_start:
            return self._shortened(length, self.dense.truncated(length - self.packed), self.tiles)
        if length <= sink:
            return LayerState(self.config, self._first_sinks().truncated(length), self.tiles.emptied())
        if (length - sink) % size:
            below = length - (length - sink) % size
            raise ValueError(
                f"crop to {length} tokens would cut through a packed tile; allowed are 0 to {sink}, "
                f"{below}, {below + size} (or any other whole tile) and {self.tail_start} to {self.length}"
            )
        return self._shortened(length, self.dense.truncated(sink), self.tiles.cropped((length - sink) // size))

    def index_select(self, indices: torch.Tensor) -> LayerState:
        """Batch rows ``indices`` (int64, repeats allowed); tiles are re-mapped, not moved."""
        arenas = self.tiles.parts
        parts = {n: t if n in arenas else t.index_select(0, indices) for n, t in self.parts.items()}
        return replace(self.with_parts(parts), tiles=self.tiles.select(indices))

    def compacted(self) -> LayerState:
        """With no arena row that no batch row uses."""
        return replace(self, tiles=self.tiles.with_own_rows())

    def to(self, device: torch.device | str) -> LayerState:
        """On another device."""
        return self.map(lambda t: t.to(device, non_blocking=True))

    def writable(self) -> LayerState:
        """With no tensor from ``torch.inference_mode``, which could not be appended to outside of it."""
        if torch.is_inference_mode_enabled() or not any(t.is_inference() for t in self.parts.values()):
            return self
        return self.map(torch.clone)

    def _first_sinks(self) -> DenseTokens:
        """The first ``sink_length`` tokens: rows' sinks begin behind their padding, which goes back to its place."""
        sink, padding = self.config.sink_length, self.padding
        if padding is None:
            return self.dense
        keys, values = self.dense.keys[:, :, :sink], self.dense.values[:, :, :sink]
        keys = padding.restored(keys, keys, padding.key, sink)
        return DenseTokens.copied(keys, padding.restored(values, values, padding.value, sink))

    def _shortened(self, length: int, dense: DenseTokens, tiles: PackedTiles) -> LayerState:
        padding = None if self.padding is None else self.padding.shortened(length)
        return replace(self, dense=dense, tiles=tiles, padding=padding)
