"""A layer with room for a fixed number of tokens, whose decode step can be compiled into one CUDA graph.

A step of one token runs the operators of :mod:`kvarn_hf.ops.steps`, which need nothing from the host. Everything else
(a prefill, cropping, reordering, saving) takes a snapshot of the layer, changes that, and puts it back.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import StaticLayer

from kvarn_hf import ops
from kvarn_hf.config import KVarNConfig
from kvarn_hf.layers.packed import PackedLayer
from kvarn_hf.layers.reading import Reading
from kvarn_hf.layers.step import SharedStep, StepSource
from kvarn_hf.ops import steps
from kvarn_hf.state import storage as storages
from kvarn_hf.state.layer_state import LayerState
from kvarn_hf.state.storage import Layout


class StaticKVarNLayer(PackedLayer):
    """Like :class:`~kvarn_hf.layers.growing.KVarNLayer`, with storage that is allocated once.

    Parameters
    ----------
    config : KVarNConfig
    latent_dims : tuple of int, optional
        See :class:`~kvarn_hf.layers.packed.PackedLayer`.
    index : int
        Which of the cache's layers this is.
    shared : SharedStep
        The cache's.
    """

    is_compileable = True

    def __init__(
        self, config: KVarNConfig, latent_dims: tuple[int, int] | None, index: int, shared: SharedStep
    ) -> None:
        self.index, self.shared = index, shared
        # From the first tokens on: everything held, and how to find it by the shared counters.
        self.storage: Any = None
        self.layout: Any = None
        self.all_counters: Any = None  # the shared ones, on the storage's device
        self.held_layout: str | None = None  # the layout's text while tokens are held: all that steps ask for
        self.sure_room = 0  # for so many steps more there is room, and maybe for others
        self.changes = [0]  # counted: what is handed out for reading is of one of them
        super().__init__(config, latent_dims)

    def __setstate__(self, held: dict[str, Any]) -> None:
        self.__dict__.update(held)
        if self.storage is not None:
            self.storage = storages.own(self.storage)
            self.all_counters = self.shared.counters[str(self.storage.device)]
            self.shared.register(self.index, self.storage, self.layout)

    def __copy__(self) -> StaticKVarNLayer:
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__)  # a shallow copy: the same storage
        return new

    @property
    def max_cache_len(self) -> int:
        """Tokens there is room for."""
        assert self.shared.max_cache_len is not None
        return self.shared.max_cache_len

    @property
    def counters(self) -> torch.Tensor:
        """``[4]``, int64, on the device: this layer's row of the shared counters."""
        return self.all_counters[self.index]  # type: ignore[no-any-return]

    @property
    def batch(self) -> int:
        """Rows of the tokens held, which the host knows."""
        return self.layout.batch  # type: ignore[no-any-return]

    @property
    def token_bytes(self) -> int:
        """Bytes that a token of every row takes unquantized; 0 before any."""
        return self.layout.token_bytes if self.is_initialized else 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate everything, for keys and values like these."""
        if key_states.device.type == "meta":
            raise ValueError("max_cache_len must be None for tensors on the device meta, which hold no lengths")
        super().lazy_initialization(key_states, value_states)

    def snapshot(self) -> LayerState | None:
        """What the layer holds, as a value: waits for the device, which knows the lengths, and copies dense tokens."""
        if not self.is_initialized:
            return None
        length, count, _, _ = self.counters.tolist()
        # A tile that the next step would pack is packed: what is stored depends on the tokens alone.
        return ops.commit(storages.state_of(self.storage, self.layout, length, count))

    def replace(self, state: LayerState | None) -> None:
        """Hold this instead; None: nothing. The storage stays where it is if it fits."""
        self.sure_room = 0
        self.changes[0] += 1
        if state is None:
            self.is_initialized, self.held_layout = False, None
            if self.storage is not None:
                self.counters.zero_()
            return
        check_room(state.length, self.max_cache_len)
        padding = ops.left_padding(state)
        padded = padding is not None and bool((padding.length > 0).any())
        layout = Layout.of(state.config, state.dense.key_buffer, state.dense.value_buffer, self.max_cache_len)
        self._make_room(layout._replace(padded=int(padded)), state.device)
        storages.put(state, padding, self.storage, self.layout)
        self.counters.copy_(torch.tensor([state.length, state.count, 0, 0]))
        self.is_initialized, self.held_layout = True, self.layout.text if state.length else None

    def _make_room(self, layout: Layout, device: torch.device) -> None:
        known, shared = self.layout, self.shared
        self.layout = layout
        fits = self.storage is not None and self.storage.device == device
        if fits and known == layout:
            return
        if fits and known._replace(padded=layout.padded) == layout:
            shared.register(self.index, self.storage, layout)
            return
        self.storage = storages.allocate(layout, device)
        self.all_counters = shared.counters_on(self.index, device)
        shared.register(self.index, self.storage, layout)
        home = str(device)
        if self.index == shared.first_layer[home]:
            table, query_heads = shared.groups[home][layout.text].table, shared.fused_query_heads(layout.heads)
            steps.compile_ahead(self.storage, table, self.all_counters, self.index, layout, query_heads)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, lazy: bool = False, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Append tokens; see :meth:`PackedLayer.update`.

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
        attention = self.shared.attention
        if "flash" in (attention or ""):
            raise ValueError(
                "max_cache_len needs attn_implementation 'kvarn', 'sdpa', 'eager' or 'flex_attention', "
                f"got {attention!r}"
            )
        check_room(int(self.get_seq_length()) + key_states.shape[2], self.max_cache_len)
        return super().update(key_states, value_states, *args, lazy=lazy, **kwargs)

    def steps(self, tokens: int) -> bool:
        """Whether so many new tokens are taken as a step without the host."""
        return tokens == 1 and self.held_layout is not None

    def _step(self, keys: torch.Tensor, values: torch.Tensor, lazy: bool) -> tuple[Any, Any]:
        steps.check_tokens(keys, values, self.layout, self.device)
        if self.index == self.shared.first_layer[str(keys.device)]:
            self._claim_room()
        self.changes[0] += 1
        source = _take(self, self.shared, self.index, keys, values, compiled=False)
        source.write()
        source.expire_after(self.changes)
        reading = Reading(source, self.reads)
        return reading.lazy() if lazy else reading.dense()

    def get_seq_length(self) -> Any:
        """Tokens held: a tensor on the device, as lengths are there; 0 before any."""
        return self.all_counters[self.index, 0] if self.held_layout is not None else 0

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
        return 0 if self.storage is None else self.storage.nbytes  # type: ignore[no-any-return]

    def remember(self) -> Any:
        """What :meth:`restore` needs to undo the next update."""
        return self.snapshot()

    def restore(self, held: Any) -> None:
        """Undo the updates since :meth:`remember`."""
        self.replace(held)

    def _claim_room(self) -> None:
        # Asking the device how long it is, before every step, would cost more than counting steps.
        if self.sure_room < 1:
            self.sure_room = self.max_cache_len - int(self.get_seq_length())
            check_room(self.max_cache_len + 1 - self.sure_room, self.max_cache_len)
        self.sure_room -= 1


def traced_update(
    layer: StaticKVarNLayer, shared: SharedStep, index: int, keys: torch.Tensor, values: torch.Tensor
) -> tuple[Any, Any]:
    """The step of :meth:`StaticKVarNLayer.update` in compiled code.

    Nobody can ask the module that calls how it will read, so the model's config says. If lazily, the token is stored
    only when attention reads keys and values.
    """
    source = _take(layer, shared, index, keys, values, compiled=True)
    if shared.lazy:
        return Reading(source, None).lazy()
    source.write()
    return source.dense()


def _take(
    layer: StaticKVarNLayer, shared: SharedStep, index: int, keys: torch.Tensor, values: torch.Tensor, *, compiled: bool
) -> StepSource:
    """Begin a step of one layer, whose token is yet to be written; asks the layer for one attribute only."""
    layout = layer.held_layout
    assert layout is not None
    device = str(keys.device)
    if index == shared.first_layer[device]:
        shared.begin(device, layout, compiled=compiled)
    if torch.is_grad_enabled():  # where nothing is recorded, two operations less to trace
        keys, values = keys.detach(), values.detach()
    return StepSource(shared, index, layout, (keys, values))


class StaticDenseLayer(StaticLayer):
    """Transformers' static layer, which reads no further than its tokens in a prefill, as its neighbours do."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Append tokens ``[batch, heads, tokens, head_dim]``.

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
