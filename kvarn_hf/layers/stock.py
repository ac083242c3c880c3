"""What a cache asks of Transformers' own layers, and they do not offer: their bytes, cropping, rows, and undoing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin, StaticLayer


def tensors_in(items: Iterable[Any]) -> list[torch.Tensor]:
    """Every tensor among ``items``, and in the lists, tuples and dicts among them."""
    tensors: list[torch.Tensor] = []
    pending = list(items)
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            tensors.append(item)
        elif isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, (list, tuple)):
            pending.extend(item)
    return tensors


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storage that these tensors keep alive, each counted once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}.values())


def layer_bytes(layer: Any) -> int:
    """Bytes that a layer of Transformers' holds."""
    return storage_bytes(tensors_in(vars(layer).values()))


def check_croppable(layer: StaticLayer) -> None:
    """Refuse to crop a layer that has let go of the tokens before its window."""
    if not hasattr(layer, "crop") or (layer.is_sliding and layer.get_seq_length() > layer.max_cache_len):
        raise ValueError(
            f"max_cache_len must be None to crop this cache: a {type(layer).__name__} does not keep what it drops"
        )


def select_rows(layer: StaticLayer, rows: torch.Tensor) -> None:
    """What Transformers' static layers lack, for any choice of batch rows."""
    layer.reorder_cache(rows.to(layer.keys.device))


def make_fit(layer: StaticLayer, keys: torch.Tensor) -> None:
    """Let an empty static layer allocate its storage again, if the tokens are not like those of before."""
    if layer.is_initialized and not torch.compiler.is_compiling():
        like = (layer.keys.shape[:2], layer.keys.dtype, layer.keys.device)
        if like != (keys.shape[:2], keys.dtype, keys.device) and not layer.get_seq_length():
            layer.is_initialized = False


def empty(layer: Any) -> None:
    """Forget everything."""
    layer.reset()
    if isinstance(layer, DynamicLayer):  # Transformers 5.17 zeroes its tokens instead of emptying it
        layer.keys = layer.values = None
        layer.is_initialized = False


def remember(layer: Any) -> Any:
    """What :func:`restore` needs to undo one update, without keeping the memory that the update frees."""
    if type(layer) is DynamicLayer:
        return layer.get_seq_length()
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return _copied(vars(layer))  # it writes its states in place
    if isinstance(layer, StaticLayer):
        # So does this one, but behind the tokens it holds, unless a window moves.
        return _copied({k: v for k, v in vars(layer).items() if layer.is_sliding or k not in ("keys", "values")})
    return vars(layer).copy()


def restore(layer: Any, held: Any) -> None:
    """Undo the updates since :func:`remember` gave ``held``."""
    if type(layer) is DynamicLayer:
        if held < layer.get_seq_length():
            layer.crop(held - layer.get_seq_length())
    elif isinstance(layer, StaticLayer):
        for name, value in held.items():
            current = getattr(layer, name)
            if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
                current.copy_(value)  # compiled steps rely on its address
            else:
                setattr(layer, name, value)
    else:
        vars(layer).update(held)


def _copied(item: Any) -> Any:
    if isinstance(item, dict):
        return {name: _copied(value) for name, value in item.items()}
    return item.detach().clone() if isinstance(item, torch.Tensor) else item
