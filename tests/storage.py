"""What an object really keeps alive."""

from __future__ import annotations

import dataclasses

import torch


def held_storages(item: object, seen: set[int] | None = None) -> dict[int, int]:
    """Bytes of every tensor storage reachable from ``item``, by address, found by walking attributes and containers."""
    seen = set() if seen is None else seen
    if id(item) in seen or isinstance(item, (str, bytes, int, float, type, torch.dtype, torch.device, type(None))):
        return {}
    seen.add(id(item))
    if isinstance(item, torch.Tensor):
        storage = item.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()} if storage.nbytes() else {}
    if isinstance(item, dict):
        parts = list(item.values())
    elif isinstance(item, (list, tuple, set)):
        parts = list(item)
    elif dataclasses.is_dataclass(item):
        parts = [getattr(item, field.name) for field in dataclasses.fields(item)]
    else:
        parts = list(getattr(item, "__dict__", {}).values())
    found: dict[int, int] = {}
    for part in parts:
        found.update(held_storages(part, seen))
    return found


def held_bytes(item: object) -> int:
    """Sum of :func:`held_storages`."""
    return sum(held_storages(item).values())
