"""A cache as one safetensors file: every layer's tensors under ``layers.<i>.<name>``, everything else in the header."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvarn_hf.checks import torch_device
from kvarn_hf.config import KVarNConfig
from kvarn_hf.layers.fixed import StaticDenseLayer
from kvarn_hf.layers.growing import KVarNLayer
from kvarn_hf.layers.packed import PackedLayer
from kvarn_hf.monitor.log import TileLog
from kvarn_hf.state.dense import DenseTokens
from kvarn_hf.state.layer_state import LayerState
from kvarn_hf.state.padding import LeftPadding
from kvarn_hf.state.tiles import PackedTiles

_FORMAT = "kvarn_hf cache 2"
# Their 8-bit codes count from the row's minimum.
_OLDER_FORMATS = ("kvarn_hf cache 1",)

Parts = dict[str, torch.Tensor]


def save(path: str | Path, layers: Iterable[Any], header: dict[str, Any]) -> None:
    """Write a cache's layers, and a header of plain values that :func:`load` gives back.

    Raises
    ------
    ValueError
        If a layer is of a kind that cannot be saved, or ``path`` lies in no folder.
    """
    tensors: Parts = {}
    entries: list[dict[str, Any]] = []
    for index, layer in enumerate(layers):
        entry, parts = _layer_parts(layer)
        entries.append(entry)
        tensors.update({f"layers.{index}.{name}": t.contiguous() for name, t in parts.items()})
    if not Path(path).parent.is_dir():
        raise ValueError(f"path must lie in a folder that exists, got {str(path)!r}")
    save_file(tensors, path, metadata={"format": _FORMAT, "cache": json.dumps({"layers": entries, **header})})


def load(path: str | Path, device: torch.device | str) -> tuple[dict[str, Any], list[Parts]]:
    """The header that was saved, with an entry per layer in ``header["layers"]``, and every layer's tensors.

    Raises
    ------
    ValueError
        If the file is none that :func:`save` wrote, or of an older format.
    """
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
        parts: list[Parts] = [{} for _ in header["layers"]]
        for key in file.keys():  # noqa: SIM118 (safe_open is no mapping)
            _, index, name = key.split(".", 2)
            parts[int(index)][name] = file.get_tensor(key)
    return header, parts


def layer_from(entry: dict[str, Any], parts: Parts, new_log: Callable[[], TileLog | None]) -> Any:
    """The layer that an entry of :func:`load` and its tensors describe."""
    if entry["kind"] == "kvarn":
        return _kvarn_layer_from(entry, parts, new_log())
    stock: Any = DynamicLayer() if entry["kind"] == "dense" else DynamicSlidingWindowLayer(entry["sliding_window"])
    if parts:
        stock.lazy_initialization(parts["keys"], parts["values"])
        stock.keys, stock.values = parts["keys"], parts["values"]
        if entry["kind"] == "sliding":
            stock.cumulative_length = entry["cumulative_length"]
    return stock


def _layer_parts(layer: Any) -> tuple[dict[str, Any], Parts]:
    if isinstance(layer, PackedLayer):
        return _kvarn_layer_parts(layer)
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        entry: dict[str, Any] = {"kind": "dense"}
        if type(layer) is DynamicSlidingWindowLayer:
            window = {"sliding_window": layer.sliding_window, "cumulative_length": layer.cumulative_length}
            entry = {"kind": "sliding", **window}
        return entry, {"keys": layer.keys, "values": layer.values} if layer.is_initialized else {}
    if isinstance(layer, StaticDenseLayer):
        held = slice(int(layer.get_seq_length()))
        parts = {"keys": layer.keys[:, :, held], "values": layer.values[:, :, held]} if layer.is_initialized else {}
        return {"kind": "dense"}, parts
    raise ValueError(
        "save() supports full-attention layers and, without max_cache_len, sliding-window layers, "
        f"got a {type(layer).__name__}"
    )


def _kvarn_layer_parts(layer: PackedLayer) -> tuple[dict[str, Any], Parts]:
    entry: dict[str, Any] = {"kind": "kvarn", "config": layer.config.to_dict(), "latent_dims": layer.latent_dims}
    state = layer.snapshot()
    if state is None:
        return entry, {}
    entry |= {"state_config": state.config.to_dict(), "count": state.count}
    parts = state.parts | {"dense_keys": state.dense.keys, "dense_values": state.dense.values}
    arenas = state.tiles.with_own_rows().parts
    for name in (*arenas, "rows"):
        parts.pop(name, None)
    if state.count:
        parts |= {name: arena[:, :, : state.count] for name, arena in arenas.items()}
    if state.padding is not None:
        entry["scanned"] = state.padding.scanned
    if layer.log is not None and layer.log.figures is not None:
        parts["figures"] = layer.log.figures
    return entry, parts


def _kvarn_layer_from(entry: dict[str, Any], parts: Parts, log: TileLog | None) -> KVarNLayer:
    latent_dims = tuple(entry["latent_dims"]) if entry["latent_dims"] else None
    layer = KVarNLayer(KVarNConfig(**entry["config"]), latent_dims, log)  # type: ignore[arg-type]
    if not parts:
        return layer
    dense = DenseTokens.copied(parts["dense_keys"], parts["dense_values"])
    layer.lazy_initialization(dense.keys, dense.values)
    padding = None
    if "padding.run" in parts:
        padding = LeftPadding(parts["padding.run"], entry["scanned"], parts["padding.key"], parts["padding.value"])
    config = KVarNConfig(**entry["state_config"])
    tiles = _tiles_from(config, entry["count"], parts, dense)
    layer.state = LayerState(config, dense, tiles, parts.get("prescale"), padding)
    if layer.log is not None:
        layer.log.figures = parts.get("figures")
    return layer


def _tiles_from(config: KVarNConfig, count: int, parts: Parts, dense: DenseTokens) -> PackedTiles:
    """In arenas with the room that a cache has which packed them itself."""
    batch, heads, _, key_dim = dense.keys.shape
    tiles = PackedTiles.allocate(batch, heads, key_dim, dense.values.shape[3], config, count, dense.keys.device)
    for name, arena in tiles.parts.items() if count else ():
        arena[:, :, :count] = parts[name]
    return PackedTiles.of(tiles.parts, count)
