"""A layer with room for a fixed number of tokens, whose decode step can be compiled into one CUDA graph.

A step of one token runs the operators of :mod:`kvarn_hf.ops.steps`, which need nothing from the host. Everything else
(a prefill, cropping, reordering, saving) takes the layer's state as a value, changes that, and puts it back.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import StaticLayer

from kvarn_hf.config import KVarNConfig
from kvarn_hf.layers.growing import KVarNLayer
from kvarn_hf.layers.lazy import LazyStates, reads_lazily
from kvarn_hf.layers.static_reading import StaticReading, TracedStates
from kvarn_hf.ops import steps as static
from kvarn_hf.state.layer_state import LayerState


class Group:
    """Layers of one layout on one device, whose tiles are packed together: every layer's storage, None for those that
    do not belong, and the addresses of its tensors."""

    def __init__(self, layers: int, storage: torch.Tensor, layout: static.Layout) -> None:
        self.storages: list[torch.Tensor | None] = [None] * layers
        tensors = len(static.addresses(storage, layout))
        self.table = static.zeros((layers, tensors), torch.int64, storage.device)

    def put(self, row: int, storage: torch.Tensor | None, addresses: torch.Tensor | int = 0) -> None:
        """Let a layer take part with this storage, or none."""
        self.storages[row] = storage
        self.table[row] = addresses

    def members(self) -> tuple[list[torch.Tensor], list[int]]:
        """Storages and rows of the layers that take part."""
        rows = [row for row, storage in enumerate(self.storages) if storage is not None]
        return [self.storages[row] for row in rows], rows  # type: ignore[misc]


class Progress:
    """What the static layers of a cache have in common: lengths, room, and the config of the model they serve.

    The lengths of all are in one tensor ``[layers, 4]`` on every device that holds some; see :mod:`kvarn_hf.ops.steps`.
    Compiled code compares at every step whatever it asked for, so it asks here and not in each layer.
    """

    def __init__(self, layers: int, max_cache_len: int | None, model_config: PreTrainedConfig | None) -> None:
        self.layers, self.max_cache_len, self.model_config = layers, max_cache_len, model_config
        self.tensors: dict[str, torch.Tensor] = {}
        self.groups: dict[str, dict[str, Group]] = {}  # on every device, by the layout's text
        self.left: dict[tuple[str, str], Group] = {}  # without layers now: compiled code relies on a table's address
        self.first: dict[str, int] = {}  # the first layer on a device begins the step for all of them
        # Devices on which this has happened in the current forward pass, if not compiled, and layouts packed there.
        self.begun: dict[str, set[str]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Progress:
        # The copy serves the same model: with a config of its own, its steps would be compiled again.
        memo[id(self.model_config)] = self.model_config
        memo[id(self)] = new = type(self).__new__(type(self))
        new.__setstate__(copy.deepcopy(self.__dict__, memo))
        return new

    def __setstate__(self, held: dict[str, Any]) -> None:
        tensors = {name: static.own(x) for name, x in held["tensors"].items()}
        self.__dict__.update(held, tensors=tensors, groups={}, left={})  # layers put their storages in again

    @property
    def attention(self) -> str | None:
        """The model's attention implementation."""
        return getattr(self.model_config, "_attn_implementation", None)

    def fused_query_heads(self, heads: int) -> int | None:
        """Of fused attention to ``heads`` KV heads, as far as the config says; None where attention is not fused."""
        if self.attention not in reads_lazily:
            return None
        query_heads = getattr(self.model_config, "num_attention_heads", None)
        return query_heads if isinstance(query_heads, int) else heads  # some configs say it per layer

    def of(self, row: int, device: torch.device) -> torch.Tensor:
        """The lengths on the device of layer ``row``."""
        name = str(device)
        if name not in self.tensors:
            self.tensors[name] = static.zeros((self.layers, 4), torch.int64, device)
        self.first[name] = min(row, self.first.get(name, row))
        return self.tensors[name]

    def place(self, row: int, storage: torch.Tensor, layout: static.Layout) -> None:
        """Say where layer ``row`` keeps what it holds."""
        for device, groups in self.groups.items():
            for text, group in list(groups.items()):
                if group.storages[row] is not None:
                    group.put(row, None)
                if not group.members()[1]:
                    self.left[device, text] = groups.pop(text)
        device, text = str(storage.device), layout.text
        groups = self.groups.setdefault(device, {})
        if text not in groups:
            known = (device, text) in self.left
            groups[text] = self.left.pop((device, text)) if known else Group(self.layers, storage, layout)
        groups[text].put(row, storage, static.addresses(storage, layout))

    def begin(self, device: str, layout: str, *, compiled: bool) -> None:
        """Begin a step of all layers on a device: their lengths, and the tiles that are due."""
        static.advance(self.tensors[device], layout)
        packed: set[str] = set()
        if not compiled:
            self.begun[device] = packed
            if static.may_skip_pack(self.tensors[device]):
                return
        for text, group in self.groups[device].items():
            static.pack(*group.members(), group.table, self.tensors[device], text)
            packed.add(text)

    def take_back(self) -> None:
        """Undo the step that has begun; what it has packed stays packed, as the next step would do it anyway."""
        for device, packed in self.begun.items():
            length, count, due, full = self.tensors[device].unbind(1)
            length -= 1 - full
            for text, group in self.groups[device].items():
                if text not in packed:
                    rows = group.members()[1]
                    count[rows] -= due[rows]
            due.zero_()
            full.zero_()
        self.begun.clear()


class StaticKVarNLayer(KVarNLayer):
    """Like :class:`~kvarn_hf.layers.growing.KVarNLayer`, with storage that is allocated once.

    Parameters
    ----------
    config : KVarNConfig
    latent_dims : tuple of int, optional
        See :class:`~kvarn_hf.layers.growing.KVarNLayer`.
    row : int
        Which of the cache's layers this is.
    progress : Progress
        The cache's.
    """

    is_compileable = True

    def __init__(
        self,
        config: KVarNConfig,
        latent_dims: tuple[int, int] | None,
        row: int,
        progress: Progress,
    ) -> None:
        self.row, self.all_progress = row, progress
        # From the first tokens on: everything held, the lengths, and how to find the one by the others.
        self.storage: Any = None
        self.progress: Any = None
        self.layout: Any = None
        self.home: str | None = None
        self.form: str | None = None  # the layout's text while tokens are held: all that steps ask for
        self.sure_room = 0  # for so many steps more there is room, and maybe for others
        self.changes = [0]  # counted: what is handed out for reading is of one of them
        super().__init__(config, latent_dims)

    def __setstate__(self, held: dict[str, Any]) -> None:
        self.__dict__.update(held)
        if self.home is not None:
            self.storage, self.progress = static.own(self.storage), self.all_progress.tensors[self.home]
            self.all_progress.place(self.row, self.storage, self.layout)

    def __copy__(self) -> StaticKVarNLayer:
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__)  # a shallow copy: the same storage
        return new

    @property
    def max_cache_len(self) -> int:
        """Tokens there is room for."""
        assert self.all_progress.max_cache_len is not None
        return self.all_progress.max_cache_len

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate everything, for keys and values like these."""
        if key_states.device.type == "meta":
            raise ValueError("max_cache_len must be None for tensors on the device meta, which hold no lengths")
        super().lazy_initialization(key_states, value_states)

    @property
    def state(self) -> LayerState | None:  # type: ignore[override]
        """What the layer holds. Reads lengths back from the device."""
        if not self.is_initialized:
            return None
        length, count, _, _ = self.progress[self.row].tolist()
        # A tile that the next step would pack is packed: what is stored depends on the tokens alone.
        return static.state_of(self.storage, self.layout, length, count).committed()

    @state.setter
    def state(self, state: LayerState | None) -> None:
        self.sure_room = 0
        self.changes[0] += 1
        if state is None:
            self.is_initialized, self.form = False, None
            if self.progress is not None:
                self.progress[self.row] = 0
            return
        check_room(state.length, self.max_cache_len)
        keys, values = state.dense.key_buffer, state.dense.value_buffer
        padding = static.padding_of(state)
        padded = padding is not None and bool((padding.length > 0).any())
        layout = static.Layout.of(state.config, keys, values, self.max_cache_len)._replace(padded=int(padded))
        home = str(keys.device)
        if self.home != home or self.layout._replace(padded=layout.padded) != layout:
            self.storage = static.allocate(layout, keys.device)
            self.progress, self.home = self.all_progress.of(self.row, keys.device), home
            self.all_progress.place(self.row, self.storage, layout)
            if self.row == self.all_progress.first[home]:
                query_heads = self.all_progress.fused_query_heads(layout.heads)
                table = self.all_progress.groups[home][layout.text].table
                static.compile_ahead(self.storage, table, self.progress, self.row, layout, query_heads)
        elif self.layout != layout:
            self.all_progress.place(self.row, self.storage, layout)
        self.layout = layout
        static.put(state, self.storage, layout)
        self.progress[self.row] = torch.tensor([state.length, state.count, 0, 0])
        self.is_initialized, self.form = True, layout.text if state.length else None

    @property
    def batch(self) -> int:
        """Rows of the tokens held, which the host knows."""
        return self.layout.batch

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, lazy: bool = False, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Append tokens; see :meth:`KVarNLayer.update`.

        A step of one token never waits for the device, and can be compiled (by :func:`traced_update`): its keys and
        values have the length ``max_cache_len``, as those of Transformers' static layers have. A token for which a
        compiled step finds no room is dropped, and attention gives NaN; ``generate()`` asks for the mask's sizes
        before, which raises.

        Raises
        ------
        ValueError
            As there, and if there is no room for the new tokens, or the model uses flash attention, to which nothing
            says where the tokens end.
        """
        if self.steps(key_states.shape[2]):
            return self._step(key_states, value_states, lazy)
        attention = self.all_progress.attention
        if "flash" in (attention or ""):
            raise ValueError(
                "max_cache_len needs attn_implementation 'kvarn', 'sdpa', 'eager' or 'flex_attention', "
                f"got {attention!r}"
            )
        check_room(int(self.get_seq_length()) + key_states.shape[2], self.max_cache_len)
        return super().update(key_states, value_states, *args, lazy=lazy, **kwargs)

    def steps(self, tokens: int) -> bool:
        """Whether so many new tokens are taken as a step without the host."""
        return tokens == 1 and self.form is not None

    def _step(self, keys: torch.Tensor, values: torch.Tensor, lazy: bool) -> tuple[Any, Any]:
        static.check_tokens(keys, values, self.layout, self.device)
        assert self.home is not None
        if self.row == self.all_progress.first[self.home]:
            self._claim_room()
        self.changes[0] += 1
        reading = _take(self, self.all_progress, self.row, keys, values, self.reads, writes=True)
        reading.expire_after(self.changes)
        return LazyStates.pair(reading) if lazy else reading.dense()

    def get_seq_length(self) -> Any:
        """Tokens held: a tensor on the device, as lengths are there; 0 before any."""
        return self.progress[self.row, 0] if self.form is not None else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that attention will see after ``query_length`` more tokens.

        Raises
        ------
        ValueError
            If there is no room for them.
        """
        if not self.steps(query_length):
            length = int(self.get_seq_length()) + query_length
            check_room(length, self.max_cache_len)
            return length, 0
        if torch.compiler.is_compiling():
            self.sure_room = 0  # nobody counts compiled steps
        else:
            self._claim_room()
        return self.max_cache_len, 0

    def get_max_length(self) -> int:
        """Tokens there is room for."""
        return self.max_cache_len

    def memory_footprint(self) -> int:
        """Bytes of all storage this layer keeps alive, unused capacity included."""
        return 0 if self.storage is None else self.storage.nbytes

    def reset(self) -> None:
        """Forget everything; the storage stays where it is, and compiled steps stay valid."""
        self.state = None
        self.reads = {"fused": 0, "dequantized": 0}

    def remember(self) -> tuple[Any, ...] | None:
        """What :meth:`restore` needs to undo the next update."""
        state = self.state
        return None if state is None else (state,)

    def restore(self, held: tuple[Any, ...] | None) -> None:
        """Undo the updates since :meth:`remember`."""
        self.state = None if held is None else held[0]

    def _claim_room(self) -> None:
        # Asking the device how long it is, before every step, would cost more than counting steps.
        if self.sure_room < 1:
            self.sure_room = self.max_cache_len - int(self.get_seq_length())
            check_room(self.max_cache_len + 1 - self.sure_room, self.max_cache_len)
        self.sure_room -= 1


def traced_update(
    layer: StaticKVarNLayer, progress: Progress, row: int, keys: torch.Tensor, values: torch.Tensor
) -> tuple[Any, Any]:
    """The step of :meth:`StaticKVarNLayer.update` in compiled code, of layer ``row``.

    Nobody can ask the module that calls how it will read, so the model's config says. If lazily, reading stores the
    token: where keys and values are never looked at, it is lost.
    """
    lazy = progress.attention in reads_lazily
    reading = _take(layer, progress, row, keys, values, None, writes=not lazy)
    if lazy:
        return TracedStates(reading, False), TracedStates(reading, True)
    return reading.dense()


def _take(
    layer: StaticKVarNLayer,
    progress: Progress,
    row: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    counts: dict[str, int] | None,
    *,
    writes: bool,
) -> StaticReading:
    """Append a token, now or as it is read; ``counts`` is None in compiled code, which depends on one attribute of the
    layer."""
    layout = layer.form
    assert layout is not None
    device = str(keys.device)
    if row == progress.first[device]:
        progress.begin(device, layout, compiled=counts is None)
    lengths, storage = progress.tensors[device], progress.groups[device][layout].storages[row]
    assert storage is not None
    if torch.is_grad_enabled():  # where nothing is recorded, two operations less to trace
        keys, values = keys.detach(), values.detach()
    if writes:
        static.write(storage, lengths, row, keys, values, layout)
    shapes = tuple((x.shape[0], x.shape[1], progress.max_cache_len, x.shape[3]) for x in (keys, values))
    return StaticReading(storage, lengths, row, layout, shapes, keys.dtype, counts, (keys, values), writes)


class StaticDenseLayer(StaticLayer):
    """Transformers' static layer, which reads no further than its tokens in a prefill, as its neighbours do."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Append tokens.

        Raises
        ------
        ValueError
            If there is no room for them.
        """
        steps = self._steps(key_states.shape[2])
        self._check_room(key_states.shape[2])
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if steps:
            return keys, values
        length = int(self.get_seq_length())
        return keys[:, :, :length], values[:, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that attention will see after ``query_length`` more tokens.

        Raises
        ------
        ValueError
            If there is no room for them.
        """
        self._check_room(query_length)
        if self._steps(query_length):
            return self.max_cache_len, 0
        return int(self.get_seq_length()) + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest ``-tokens_to_remove`` tokens."""
        self.cumulative_length += tokens_to_remove  # in place: compiled steps rely on its address

    def _steps(self, tokens: int) -> bool:
        if tokens > 1 or not self.is_initialized:
            return False
        return torch.compiler.is_compiling() or bool(self.get_seq_length() > 0)

    def _check_room(self, tokens: int) -> None:
        if not torch.compiler.is_compiling():
            check_room(int(self.get_seq_length()) + tokens, self.max_cache_len)


def check_room(length: int, max_cache_len: int) -> None:
    """Refuse to hold ``length`` tokens where there is no room for them."""
    if length > max_cache_len:
        raise ValueError(
            f"max_cache_len must be at least the tokens of prompt and answer together, got {max_cache_len} "
            f"for {length} tokens; the cache still holds what it held"
        )
