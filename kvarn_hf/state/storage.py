"""A layer at fixed addresses: everything it holds lies in one tensor of bytes, which compiled steps rely on."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from kvarn_hf.config import KVarNConfig
from kvarn_hf.state.dense import DenseTokens
from kvarn_hf.state.layer_state import LayerState
from kvarn_hf.state.padding import LeftPadding
from kvarn_hf.state.tiles import PackedTiles, arena_shapes

_ALIGNMENT = 256


class Layout(NamedTuple):
    """All that is needed to find a layer's tensors in its storage.

    Operators take it as a string: compiled code guards on everything it was traced with at every step, and one string
    guard is cheaper than fifteen.
    """

    dtype: str
    batch: int
    heads: int
    key_dim: int
    value_dim: int
    most: int  # tokens there is room for
    tiles: int
    dense: int
    sink_length: int
    residual_length: int
    tile_size: int
    key_bits: int
    value_bits: int
    method: str
    iterations: int
    padded: int  # whether any row has left padding

    @classmethod
    def of(cls, config: KVarNConfig, keys: torch.Tensor, values: torch.Tensor, most: int) -> Layout:
        """For keys and values like the ones given, and at most ``most`` tokens."""
        return cls(
            dtype=str(keys.dtype).removeprefix("torch."),
            batch=keys.shape[0],
            heads=keys.shape[1],
            key_dim=keys.shape[3],
            value_dim=values.shape[3],
            most=most,
            tiles=max(1, config.packed_tiles(most)),
            dense=config.sink_length + config.residual_length + config.tile_size,
            sink_length=config.sink_length,
            residual_length=config.residual_length,
            tile_size=config.tile_size,
            key_bits=config.key_bits,
            value_bits=config.value_bits,
            method=config.method,
            iterations=config.iterations,
            padded=0,
        )

    @property
    def text(self) -> str:
        """What :meth:`parse` reads."""
        return " ".join(str(field) for field in self)

    @staticmethod
    @lru_cache(maxsize=256)
    def parse(text: str) -> Layout:
        """The layout of :attr:`text`."""
        return Layout(*(int(field) if field.isdigit() else field for field in text.split()))  # type: ignore[arg-type]

    @property
    def token_dtype(self) -> torch.dtype:
        """Of keys and values."""
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    @property
    def token_bytes(self) -> int:
        """Bytes that a token of every row takes unquantized."""
        return self.batch * self.heads * (self.key_dim + self.value_dim) * self.token_dtype.itemsize

    @property
    def config(self) -> KVarNConfig:
        """The cache's settings, as far as they shape what is stored."""
        names = "key_bits", "value_bits", "tile_size", "sink_length", "residual_length", "method", "iterations"
        return KVarNConfig(**{name: getattr(self, name) for name in names})


@lru_cache(maxsize=256)
def _places(layout: Layout) -> tuple[dict[str, tuple[int, int, torch.dtype, tuple[int, ...]]], int]:
    """Start, end, dtype and shape of every tensor by its name, and the bytes of all."""
    lead, dtype = (layout.batch, layout.heads), layout.token_dtype
    shapes = {
        "dense_keys": (dtype, (*lead, layout.dense, layout.key_dim)),
        "dense_values": (dtype, (*lead, layout.dense, layout.value_dim)),
        **arena_shapes((*lead, layout.tiles), layout.key_dim, layout.value_dim, layout.config),
        "prescale": (torch.float16, (*lead, layout.key_dim)),
        "padding.length": (torch.int64, (layout.batch,)),
        "padding.key": (dtype, (*lead, 1, layout.key_dim)),
        "padding.value": (dtype, (*lead, 1, layout.value_dim)),
    }
    places, start = {}, 0
    for name, (kind, shape) in shapes.items():
        end = start + torch.Size(shape).numel() * kind.itemsize
        places[name] = (start, end, kind, shape)
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
    return places, start


def allocate(layout: Layout, device: torch.device) -> torch.Tensor:
    """The storage of one layer."""
    return zeros((_places(layout)[1],), torch.uint8, device)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros at an address that compiled code may rely on, which can be changed in and outside of inference mode."""
    with torch.inference_mode(False):
        x = torch.zeros(shape, dtype=dtype, device=device)
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(x)
    return x


def own(x: torch.Tensor) -> torch.Tensor:
    """A copy like :func:`zeros`, of a tensor that may have been made in inference mode."""
    copy = zeros(tuple(x.shape), x.dtype, x.device)
    copy.copy_(x)
    return copy


def views(storage: torch.Tensor, layout: Layout) -> dict[str, torch.Tensor]:
    """The tensors that lie in ``storage``, by the names of :attr:`LayerState.parts`."""
    places, _ = _places(layout)
    return {name: storage[start:end].view(kind).view(shape) for name, (start, end, kind, shape) in places.items()}


def state_of(storage: torch.Tensor, layout: Layout, length: int, count: int) -> LayerState:
    """What the storage holds, as a value: dense tokens copied, tiles where they are."""
    v, config = views(storage, layout), layout.config
    used = length - count * config.tile_size
    dense = DenseTokens.copied(v["dense_keys"][:, :, :used], v["dense_values"][:, :, :used])
    padding = _padding(v, length) if count and layout.padded else None
    prescale = v["prescale"].clone() if count and config.method == "kvarn" else None
    return LayerState(config, dense, PackedTiles.of(v, count), prescale, padding)


def whole_state(storage: torch.Tensor, layout: Layout) -> LayerState:
    """Every slot there is room for, as if it were in use, between the sinks and no tail; lengths only the device knows.

    Its tensors are the storage's own.
    """
    v, config = views(storage, layout), layout.config
    dense = DenseTokens.of(v["dense_keys"], v["dense_values"], config.sink_length)
    prescale = v["prescale"] if config.method == "kvarn" else None
    return LayerState(
        config, dense, PackedTiles.of(v, layout.tiles), prescale, _padding(v, 0) if layout.padded else None
    )


def put(state: LayerState, padding: LeftPadding | None, storage: torch.Tensor, layout: Layout) -> None:
    """Make the storage hold ``state``, whose rows' padding is given also while nothing is packed.

    Tiles that are there already are not copied.
    """
    v = views(storage, layout)
    for name, tokens in (("dense_keys", state.dense.keys), ("dense_values", state.dense.values)):
        v[name][:, :, : state.dense.length] = tokens
    if state.tiles.rows is not None or state.tiles.keys.codes.data_ptr() != v["keys.codes"].data_ptr():
        for name, tensor in state.tiles.with_own_rows().parts.items():
            v[name][:, :, : state.count] = tensor[:, :, : state.count]
    v["prescale"].copy_(torch.ones_like(v["prescale"]) if state.prescale is None else state.prescale)
    v["padding.length"].zero_()
    if padding is not None:
        v["padding.length"].copy_(padding.length)
        v["padding.key"].copy_(padding.key)
        v["padding.value"].copy_(padding.value)


def _padding(v: dict[str, torch.Tensor], scanned: int) -> LeftPadding:
    return LeftPadding(v["padding.length"].clamp_min(1), scanned, v["padding.key"], v["padding.value"])
