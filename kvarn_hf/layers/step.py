"""What the fixed layers of a cache share: one step of one token begins once, for all of them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedConfig

from kvarn_hf.layers.reading import LAZY_ATTENTION, Shape
from kvarn_hf.ops import steps
from kvarn_hf.state import storage as storages
from kvarn_hf.state.storage import Layout


class Group:
    """Layers of one layout on one device, whose tiles are packed together.

    It holds every layer's storage, None for layers that do not belong, and the addresses of its tensors.
    """

    def __init__(self, layers: int, storage: torch.Tensor, layout: Layout) -> None:
        self.storages: list[torch.Tensor | None] = [None] * layers
        tensors = len(steps.addresses(storage, layout))
        self.table = storages.zeros((layers, tensors), torch.int64, storage.device)

    def register(self, layer: int, storage: torch.Tensor, layout: Layout) -> None:
        """Let a layer take part with this storage."""
        self.storages[layer] = storage
        self.table[layer] = steps.addresses(storage, layout)

    def remove(self, layer: int) -> None:
        """Let a layer take part no more."""
        self.storages[layer] = None
        self.table[layer] = 0

    def members(self) -> tuple[list[torch.Tensor], list[int]]:
        """Storages and indices of the layers that take part."""
        taking_part = [(storage, layer) for layer, storage in enumerate(self.storages) if storage is not None]
        return [storage for storage, _ in taking_part], [layer for _, layer in taking_part]


class SharedStep:
    """Counters, storages and room of a cache's fixed layers, and the config of the model they serve.

    ``counters`` are those of :mod:`kvarn_hf.ops.steps`, one tensor for all layers on every device that holds some.
    Compiled code guards at every step on whatever it asked for, so it asks here and not in each layer.
    """

    def __init__(self, layers: int, max_cache_len: int | None, model_config: PreTrainedConfig | None) -> None:
        self.layers, self.max_cache_len, self.model_config = layers, max_cache_len, model_config
        self.counters: dict[str, torch.Tensor] = {}
        self.groups: dict[str, dict[str, Group]] = {}  # on every device, by the layout's text
        self.unused: dict[tuple[str, str], Group] = {}  # without layers now: compiled code relies on a table's address
        self.first_layer: dict[str, int] = {}  # on a device: it begins the step for all of them
        # Devices on which this has happened in the current forward pass, if not compiled, and layouts packed there.
        self.begun: dict[str, set[str]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedStep:
        # The copy serves the same model: with a config of its own, its steps would be compiled again.
        memo[id(self.model_config)] = self.model_config
        memo[id(self)] = new = type(self).__new__(type(self))
        new.__setstate__(copy.deepcopy(self.__dict__, memo))
        return new

    def __setstate__(self, held: dict[str, Any]) -> None:
        counters = {name: storages.own(x) for name, x in held["counters"].items()}
        self.__dict__.update(held, counters=counters, groups={}, unused={})  # layers register their storages again

    @property
    def attention(self) -> str | None:
        """The model's attention implementation."""
        return getattr(self.model_config, "_attn_implementation", None)

    @property
    def lazy(self) -> bool:
        """Whether the model's attention reads lazily, as far as its config says."""
        return self.attention in LAZY_ATTENTION

    def fused_query_heads(self, heads: int) -> int | None:
        """Of fused attention to ``heads`` KV heads, as far as the config says; None where attention is not fused."""
        if not self.lazy:
            return None
        query_heads = getattr(self.model_config, "num_attention_heads", None)
        return query_heads if isinstance(query_heads, int) else heads  # some configs say it per layer

    def counters_on(self, layer: int, device: torch.device) -> torch.Tensor:
        """The counters on the device of a layer."""
        name = str(device)
        if name not in self.counters:
            self.counters[name] = storages.zeros((self.layers, 4), torch.int64, device)
        self.first_layer[name] = min(layer, self.first_layer.get(name, layer))
        return self.counters[name]

    def lengths(self) -> list[tuple[int, int]]:
        """Tokens held and tiles in use of every layer; waits for the devices, once each."""
        found = [(0, 0)] * self.layers
        for counters in self.counters.values():
            for layer, (length, count, _, _) in enumerate(counters.tolist()):
                found[layer] = max(found[layer], (length, count))
        return found

    def register(self, layer: int, storage: torch.Tensor, layout: Layout) -> None:
        """Say where a layer keeps what it holds."""
        for device, groups in self.groups.items():
            for text, group in list(groups.items()):
                if group.storages[layer] is not None:
                    group.remove(layer)
                if not group.members()[1]:
                    self.unused[device, text] = groups.pop(text)
        device, text = str(storage.device), layout.text
        groups = self.groups.setdefault(device, {})
        if text not in groups:
            known = (device, text) in self.unused
            groups[text] = self.unused.pop((device, text)) if known else Group(self.layers, storage, layout)
        groups[text].register(layer, storage, layout)

    def begin(self, device: str, layout: str, *, compiled: bool) -> None:
        """Begin a step of all layers on a device: their lengths, and the tiles that are due."""
        steps.advance(self.counters[device], layout)
        packed: set[str] = set()
        if not compiled:
            self.begun[device] = packed
            if steps.may_skip_pack(self.counters[device]):
                return
        for text, group in self.groups[device].items():
            steps.pack(*group.members(), group.table, self.counters[device], text)
            packed.add(text)

    def take_back(self) -> None:
        """Undo the step that has begun; what it has packed stays packed, as the next step would do it anyway."""
        for device, packed in self.begun.items():
            length, count, due, full = self.counters[device].unbind(1)
            length -= 1 - full
            for text, group in self.groups[device].items():
                if text not in packed:
                    members = group.members()[1]
                    count[members] -= due[members]
            due.zero_()
            full.zero_()
        self.begun.clear()


class StepSource:
    """A fixed layer in one step, as a :class:`~kvarn_hf.layers.reading.Reading` reads it.

    Its shapes say ``max_cache_len`` tokens: only the device knows how many there are.

    Parameters
    ----------
    shared : SharedStep
    layer : int
    layout : str
        A :attr:`Layout.text`.
    token : tuple of torch.Tensor
        The newest key and value, ``[batch, heads, 1, head_dim]``.
        Until :meth:`write` has put them there, what reads first does: attention without another launch.
    """

    def __init__(self, shared: SharedStep, layer: int, layout: str, token: tuple[torch.Tensor, torch.Tensor]) -> None:
        keys, values = token
        device, most = str(keys.device), shared.max_cache_len
        self.shapes: tuple[Shape, Shape] = (
            (keys.shape[0], keys.shape[1], most, keys.shape[3]),  # type: ignore[assignment]
            (values.shape[0], values.shape[1], most, values.shape[3]),
        )
        self.dtype, self.device = keys.dtype, keys.device
        self.storage: Any = shared.groups[device][layout].storages[layer]
        self.counters, self.layer, self.layout = shared.counters[device], layer, layout
        self.token, self.written = token, False
        self._changes, self._change = [0], 0

    def expire_after(self, changes: list[int]) -> None:
        """Let attention write the token no more once the layer changes again, which counts that here."""
        self._changes, self._change = changes, changes[0]

    def write(self) -> None:
        """Put the token behind the tail."""
        steps.write(self.storage, self.counters, self.layer, *self.token, self.layout)
        self.written = True

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, dequantized, ``[batch, heads, max_cache_len, head_dim]``."""
        if not self.written:
            self.write()
        return steps.read(self.storage, self.counters, self.layer, self.layout)

    def attend(
        self,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Fused attention; None where it is not supported."""
        if query.dtype != self.dtype or (query.requires_grad and torch.is_grad_enabled()):
            return None
        if mask is not None and mask.shape[-1] < self.shapes[0][2]:
            return None  # it may end before the tokens do
        scaling = query.shape[3] ** -0.5 if scaling is None else scaling
        token = self.token if self._changes[0] == self._change else (None, None)
        self.written = True
        held = self.storage, self.counters, self.layer
        return steps.attend(query, *token, *held, mask, sinks, self.layout, scaling, softcap or 0.0)
