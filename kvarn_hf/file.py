"""A cache as one safetensors file: every layer's tensors under ``layers.<i>.<name>``, everything else in the header."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvarn_hf.checks import torch_device
from kvarn_hf.config import KVarNConfig
from kvarn_hf.layers.fixed import StaticDenseLayer
from kvarn_hf.layers.growing import KVarNLayer
from kvarn_hf.method.quantize import Packed
from kvarn_hf.monitor.log import Monitor, TileLog
from kvarn_hf.state.layer_state import DenseTokens, LayerState
from kvarn_hf.state.padding import LeftPadding
from kvarn_hf.state.tiles import PackedTiles

if TYPE_CHECKING:
    from kvarn_hf.cache import KVarNCache

_FORMAT = "kvarn_hf cache 2"
# Their 8-bit codes count from the row's minimum.
_OLDER_FORMATS = ("kvarn_hf cache 1",)


def save(cache: KVarNCache, path: str | Path) -> None:
    """See :meth:`KVarNCache.save`."""
    tensors: dict[str, torch.Tensor] = {}
    layers: list[dict[str, Any]] = []
    for index, layer in enumerate(cache.layers):
        entry, parts = _layer_parts(layer)
        layers.append(entry)
        tensors.update({f"layers.{index}.{name}": t.contiguous() for name, t in parts.items()})
    header = {
        "layers": layers,
        "kvarn": cache.kvarn.to_dict(),
        "skip_layers": sorted(cache.skip_layers),
        "latent_dims": cache._latent_dims,
        "monitor": None if cache.monitor is None else asdict(cache.monitor),
        "from_config": cache.layer_class_to_replicate is None,
    }
    if not Path(path).parent.is_dir():
        raise ValueError(f"path must lie in a folder that exists, got {str(path)!r}")
    save_file(tensors, path, metadata={"format": _FORMAT, "cache": json.dumps(header)})


def load(cls: type[KVarNCache], path: str | Path, device: torch.device | str) -> KVarNCache:
    """See :meth:`KVarNCache.load`."""
    device = torch_device(device)
    try:
        opened = safe_open(path, framework="pt", device=str(device))
    except SafetensorError as error:
        raise ValueError(f"path must be a file written by KVarNCache.save, got {str(path)!r}: {error}") from error
    with opened as file:
        metadata = file.metadata() or {}
        if metadata.get("format") in _OLDER_FORMATS:
            raise ValueError(
                f"path must be a file in the format {_FORMAT!r}, got {str(path)!r} in the older "
                f"{metadata['format']!r}, whose codes mean other numbers: fill a new cache and save that"
            )
        if metadata.get("format") != _FORMAT:
            raise ValueError(f"path must be a file written by KVarNCache.save, got {str(path)!r}")
        header = json.loads(metadata["cache"])
        parts: list[dict[str, torch.Tensor]] = [{} for _ in header["layers"]]
        for key in file.keys():  # noqa: SIM118 (safe_open is no mapping)
            _, index, name = key.split(".", 2)
            parts[int(index)][name] = file.get_tensor(key)
    monitor = Monitor(**header["monitor"]) if header.get("monitor") else False
    cache = cls(kvarn=KVarNConfig(**header["kvarn"]), skip_layers=header["skip_layers"], monitor=monitor)
    cache._latent_dims = tuple(header["latent_dims"]) if header["latent_dims"] else None
    cache.layers = [
        _layer_from(entry, part, cache.new_log()) for entry, part in zip(header["layers"], parts, strict=True)
    ]
    if header["from_config"]:
        cache.layer_class_to_replicate = None
    return cache


def _layer_parts(layer: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    if isinstance(layer, KVarNLayer):
        entry: dict[str, Any] = {"kind": "kvarn", "config": layer.config.to_dict(), "latent_dims": layer.latent_dims}
        if layer.state is None:
            return entry, {}
        state = layer.state.compacted()
        entry |= {"state_config": state.config.to_dict(), "count": state.count}
        parts = {"dense_keys": state.dense.keys, "dense_values": state.dense.values}
        if state.count:
            for side, packed in zip(("keys", "values"), state.tiles.filled(), strict=True):
                parts |= {f"{side}.{name}": t for name, t in packed._asdict().items()}
        if state.prescale is not None:
            parts["prescale"] = state.prescale
        if layer.log is not None and layer.log.figures is not None:
            parts["figures"] = layer.log.figures
        if state.padding is not None:
            entry["scanned"] = state.padding.scanned
            parts |= {f"padding.{name}": getattr(state.padding, name) for name in ("run", "key", "value")}
        return entry, parts
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        sliding = type(layer) is DynamicSlidingWindowLayer
        entry = {"kind": "sliding" if sliding else "dense"}
        if sliding:
            entry |= {"sliding_window": layer.sliding_window, "cumulative_length": layer.cumulative_length}
        return entry, {"keys": layer.keys, "values": layer.values} if layer.is_initialized else {}
    if isinstance(layer, StaticDenseLayer):
        held = slice(int(layer.get_seq_length()))
        parts = {"keys": layer.keys[:, :, held], "values": layer.values[:, :, held]} if layer.is_initialized else {}
        return {"kind": "dense"}, parts
    raise ValueError(
        "save() supports full-attention layers and, without max_cache_len, sliding-window layers, "
        f"got a {type(layer).__name__}"
    )


def _layer_from(entry: dict[str, Any], parts: dict[str, torch.Tensor], log: TileLog | None) -> Any:
    if entry["kind"] == "kvarn":
        latent_dims = tuple(entry["latent_dims"]) if entry["latent_dims"] else None
        layer = KVarNLayer(KVarNConfig(**entry["config"]), latent_dims, log)
        if parts:
            dense = DenseTokens.copied(parts["dense_keys"], parts["dense_values"])
            layer.lazy_initialization(dense.keys, dense.values)
            config = KVarNConfig(**entry["state_config"])
            layer.state = LayerState(
                config,
                dense,
                _tiles_from(config, entry["count"], parts, dense),
                parts.get("prescale"),
                LeftPadding(parts["padding.run"], entry["scanned"], parts["padding.key"], parts["padding.value"])
                if "padding.run" in parts
                else None,
            )
            if layer.log is not None:
                layer.log.figures = parts.get("figures")
        return layer
    stock: Any = DynamicLayer() if entry["kind"] == "dense" else DynamicSlidingWindowLayer(entry["sliding_window"])
    if parts:
        stock.lazy_initialization(parts["keys"], parts["values"])
        stock.keys, stock.values = parts["keys"], parts["values"]
        if entry["kind"] == "sliding":
            stock.cumulative_length = entry["cumulative_length"]
    return stock


def _tiles_from(config: KVarNConfig, count: int, parts: dict[str, torch.Tensor], dense: DenseTokens) -> PackedTiles:
    batch, heads, _, key_dim = dense.keys.shape
    tiles = PackedTiles.allocate(batch, heads, key_dim, dense.values.shape[3], config, count, dense.keys.device)
    for side, arena in (("keys", tiles.keys), ("values", tiles.values)) if count else ():
        for name in Packed._fields:
            getattr(arena, name)[:, :, :count] = parts[f"{side}.{name}"]
    return tiles.truncated(count)
