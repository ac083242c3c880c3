"""Layers of a real cache, laid out on torch's meta device with any number of tokens in them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionCacheLayerMixin

from kvarn_hf.cache import KVarNCache
from kvarn_hf.config import KVarNConfig
from kvarn_hf.estimate.shapes import LayerShape, ModelShapes, storage_bytes
from kvarn_hf.layers.growing import KVarNLayer
from kvarn_hf.layers.stock import tensors_in
from kvarn_hf.state.dense import DenseTokens
from kvarn_hf.state.layer_state import LayerState
from kvarn_hf.state.padding import LeftPadding


@dataclass(frozen=True)
class LayerGroup:
    """``count`` layers of a cache that hold the same: what enters each, and ``fresh``, an empty one of them."""

    shape: LayerShape
    fresh: Any
    count: int
    dtype: torch.dtype

    @property
    def kind(self) -> str:
        """``"packed"``, ``"linear"``, ``"sliding"`` or ``"dense"``."""
        if isinstance(self.fresh, KVarNLayer):
            return "packed"
        if isinstance(self.fresh, LinearAttentionCacheLayerMixin):
            return "linear"
        return "sliding" if getattr(self.fresh, "is_sliding", False) else "dense"

    def bytes(self, length: int, batch: int, decoding: bool) -> int:
        """Bytes of all the layers, with ``length`` tokens in each row."""
        if self._is_packed:
            return self.count * storage_bytes(self._packed(length, batch).parts.values())
        layer = copy.copy(self.fresh)
        if self.shape.heads:
            for new in (length - 1, 1) if decoding and length > 1 else (length,):
                layer.update(*self.shape.states(new, batch, self.dtype))
        held = storage_bytes(tensors_in(vars(layer).values()))
        return self.count * (held + batch * self.shape.linear_bytes)

    def growth(self) -> float:
        """Bytes per token of one row, in the long run."""
        if self._is_packed:
            config = self._packed(1, 1).config
            tile = config.key_tile_bytes(self.shape.key_dim) + config.value_tile_bytes(self.shape.value_dim)
            return self.count * self.shape.heads * tile / config.tile_size
        grows = isinstance(self.fresh, DynamicLayer) and not self.fresh.is_sliding
        return float(self.count * storage_bytes(self.shape.states(1, 1, self.dtype))) if grows else 0.0

    def fixed_bytes(self, batch: int) -> int:
        """The most bytes that do not grow."""
        if self._is_packed:
            config = self._packed(1, 1).config
            longest = config.sink_length + config.residual_length + 2 * config.tile_size - 1
            state = self._packed(longest, batch)
            return self.count * (storage_bytes(state.parts.values()) - storage_bytes(state.tiles.parts.values()))
        if self.kind == "dense":
            return 0
        if isinstance(self.fresh, DynamicLayer) and self.fresh.is_sliding:
            return self.bytes(self.fresh.sliding_window, batch, decoding=True)
        return self.count * batch * self.shape.linear_bytes

    @property
    def _is_packed(self) -> bool:
        return isinstance(self.fresh, KVarNLayer) and self.shape.heads > 0

    def _packed(self, length: int, batch: int) -> LayerState:
        """What one packed layer holds. The layer itself decides on its settings, e.g. for latent attention."""
        keys, values = self.shape.states(length, batch, self.dtype)
        layer = copy.copy(self.fresh)
        layer.lazy_initialization(keys, values)
        empty: LayerState = layer.state
        config = empty.config
        count = config.packed_tiles(length)
        rest = slice(0, length - count * config.tile_size)
        state = replace(empty, dense=DenseTokens.copied(keys[:, :, rest], values[:, :, rest]))
        if not count:
            return state
        factors = keys.new_empty(batch, self.shape.heads, self.shape.key_dim, dtype=torch.float16)
        return replace(
            state,
            tiles=empty.tiles.reserved(count).truncated(count),
            prescale=factors if config.method == "kvarn" else None,
            padding=LeftPadding.begin(DenseTokens.of(keys, values)) if batch > 1 else None,
        )


def layer_groups(shapes: ModelShapes, settings: KVarNConfig | None) -> list[LayerGroup]:
    """Groups of a cache's layers, of the dense cache's if there are no settings; in the order of the layers."""
    cache = DynamicCache(config=shapes.config) if settings is None else KVarNCache(shapes.config, settings)
    groups: dict[tuple[Any, ...], LayerGroup] = {}
    for layer, shape in zip(cache.layers, shapes.layers, strict=True):
        key = (type(layer), getattr(layer, "sliding_window", None), shape)
        groups[key] = LayerGroup(shape, layer, groups[key].count + 1 if key in groups else 1, shapes.dtype)
    return list(groups.values())
