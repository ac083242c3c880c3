"""What growing and fixed KVarN layers have in common: everything but where they keep their state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from kvarn_hf import ops
from kvarn_hf.checks import check_like
from kvarn_hf.config import KVarNConfig
from kvarn_hf.layers.reading import Reading, StateSource
from kvarn_hf.layers.stock import storage_bytes
from kvarn_hf.monitor.log import TileLog
from kvarn_hf.state.layer_state import LayerState

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Latent attention caches the rotary part of its keys in the place of the values: too precious for two bits.
_ROTARY_KEY_BITS = 8


class PackedLayer(DynamicLayer):
    """Full-attention layer whose older tokens are packed.

    Operations take a :meth:`snapshot` of what the layer holds, make another state of it and :meth:`replace` it.

    Parameters
    ----------
    config : KVarNConfig
        Settings of this layer.
    latent_dims : tuple of int, optional
        ``(kv_lora_rank, qk_rope_head_dim)`` of a model with multi-head latent attention. When the "values" turn out to
        be the rotary part of the keys, they are kept at 8 bits.
    log : TileLog, optional
        Takes note of the tiles.
    """

    is_croppable = True

    def __init__(
        self, config: KVarNConfig, latent_dims: tuple[int, int] | None = None, log: TileLog | None = None
    ) -> None:
        self.config, self.latent_dims, self.log = config, latent_dims, log
        # How attention read the packed tiles, so far.
        self.reads = {"fused": 0, "dequantized": 0}
        super().__init__()

    def snapshot(self) -> LayerState | None:
        """What the layer holds, as a value; None before any token."""
        raise NotImplementedError

    def replace(self, state: LayerState | None) -> None:
        """Hold this instead; None: nothing."""
        raise NotImplementedError

    @property
    def batch(self) -> int:
        """Rows of the tokens held."""
        raise NotImplementedError

    @property
    def token_bytes(self) -> int:
        """Bytes that a token of every row takes unquantized; 0 before any."""
        raise NotImplementedError

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Remember dtype, device and shapes of the tokens to come, ``[batch, num_kv_heads, tokens, head_dim]``."""
        _check_states(key_states, value_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        config = self.config
        if self.latent_dims == (key_states.shape[3], value_states.shape[3]) and key_states.shape[1] == 1:
            config = config.replace(value_bits=max(config.value_bits, _ROTARY_KEY_BITS))
        self.replace(LayerState.empty(config, key_states, value_states))
        if self.log is not None:
            self.log.clear()
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, lazy: bool = False, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Append tokens, pack the tiles that are full, and return all keys and values for attention.

        Attention reads what was packed before this step dequantized, and everything else exactly, new tokens included.

        Parameters
        ----------
        key_states, value_states : torch.Tensor
            ``[batch, num_kv_heads, new_tokens, head_dim]``, float16, bfloat16 or float32; keys after the rotary
            embedding. The two head_dims may differ.
        lazy : bool
            Where attention can do without dense tensors, return some that are dequantized only when touched (see
            :mod:`kvarn_hf.layers.reading`).

        Returns
        -------
        keys, values : torch.Tensor
            ``[batch, num_kv_heads, length, head_dim]``, in the dtype given.

        Raises
        ------
        ValueError
            If dtype, rank, batch, heads, head_dim or device are not those of earlier calls. The layer then holds what
            it held, as after any other failure.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        before = self._held().writable()
        _check_states(key_states, value_states)
        _check_continues(before, key_states, value_states)
        if self.config.check_finite:
            _check_finite(key_states, value_states)
        state = before.appended(key_states, value_states)
        read: tuple[Any, Any]
        if before.length == 0:
            read = key_states, value_states
        elif lazy and ops.can_attend(state, key_states.shape[2]):
            read = Reading(StateSource(state), self.reads).lazy()
        else:
            read = ops.dense(state)
            self.reads["dequantized"] += state.count > 0
        committed = ops.commit(state)
        if self.log is not None:
            self.log.observe(state, committed)
        self.replace(committed)
        return read

    @property
    def keys(self) -> torch.Tensor | None:
        """A copy of all keys, ``[batch, num_kv_heads, length, head_dim]``, made at every access; None before any token.

        Transformers' name, and an attribute there: of a layer of fixed size it waits for the device.
        """
        return self._shown(0)

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        self._drop(value)

    @property
    def values(self) -> torch.Tensor | None:
        """A copy of all values, like :attr:`keys`."""
        return self._shown(1)

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        self._drop(value)

    def _shown(self, side: int) -> torch.Tensor | None:
        state = self.snapshot()
        if state is None:
            return None
        shown = ops.dense(state)[side]
        # While nothing is packed, it is what the layer holds: an edit in place would be kept, and later lost.
        return shown if state.count else shown.clone()

    def _drop(self, value: torch.Tensor | None) -> None:
        # The base class assigns None to start empty; anything else would be lost, as only packed tiles are stored.
        if value is not None:
            raise AttributeError("keys and values of a KVarN layer are read-only; tokens enter through update()")
        self.replace(None)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that attention will see after ``query_length`` more tokens."""
        return self.get_seq_length() + query_length, 0

    def memory_footprint(self) -> int:
        """Bytes of all storage this layer keeps alive, unused capacity included."""
        state = self.snapshot()
        if state is None:
            return 0
        return storage_bytes((*state.parts.values(), *(() if self.log is None else self.log.tensors)))

    def reset(self) -> None:
        """Forget everything."""
        self.replace(None)
        self.reads = {"fused": 0, "dequantized": 0}
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens; see :meth:`cropped`."""
        state = self.cropped(tokens_to_remove)
        if state is not None:
            self.replace(state)

    def cropped(self, tokens_to_remove: int) -> LayerState | None:
        """The state after :meth:`crop`.

        Parameters
        ----------
        tokens_to_remove : int
            Zero or negative: how many to remove. Positive: the length to keep.

        Raises
        ------
        ValueError
            If the cut would go through a packed tile. Of all tokens ever held, the newest ``residual_length``
            can always be removed, in one cut or in several.
        """
        state = self.snapshot()
        if state is None:
            return None
        return state.cropped(tokens_to_remove if tokens_to_remove > 0 else state.length + tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Let batch row i continue from row ``beam_idx[i]``."""
        self._select("beam_idx", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row ``repeats`` times."""
        if self.is_initialized:
            self._select("repeats", torch.arange(self.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor | Sequence[int]) -> None:
        """Keep only the batch rows ``indices``, and only their memory."""
        self._select("indices", indices, compact=True)

    def remember(self) -> Any:
        """What :meth:`restore` needs to undo the next update."""
        raise NotImplementedError

    def restore(self, held: Any) -> None:
        """Undo the updates since :meth:`remember`."""
        raise NotImplementedError

    def _select(self, name: str, indices: torch.Tensor | Sequence[int], compact: bool = False) -> None:
        if not self.is_initialized:
            return
        state = self._held()
        rows = _row_indices(name, indices, state)
        selected = state.index_select(rows)
        self.replace(selected.compacted() if compact else selected)
        if self.log is not None:
            self.log.select(rows)

    def _held(self) -> LayerState:
        state = self.snapshot()
        if state is None:
            raise RuntimeError("the layer holds no tokens yet")
        return state


def _row_indices(name: str, indices: torch.Tensor | Sequence[int], state: LayerState) -> torch.Tensor:
    rows = torch.as_tensor(indices, device=state.device)
    if rows.dtype == torch.bool:
        rows = rows.nonzero().squeeze(1)
    if rows.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {list(rows.shape)}")
    rows = rows.to(torch.int64)
    return torch.where(rows < 0, rows + state.batch, rows)


def _check_states(keys: torch.Tensor, values: torch.Tensor) -> None:
    for name, x in (("key_states", keys), ("value_states", values)):
        if x.ndim != 4:
            raise ValueError(f"{name} must be [batch, num_kv_heads, tokens, head_dim], got shape {list(x.shape)}")
        if x.dtype not in _DTYPES:
            raise ValueError(f"{name} must be float16, bfloat16 or float32, got {x.dtype}")
        if x.shape[3] % 8 or not 8 <= x.shape[3] <= 1024:
            raise ValueError(f"head_dim of {name} must be a multiple of 8 from 8 to 1024, got {x.shape[3]}")
    if keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            "value_states must have the batch, heads and tokens of key_states "
            f"{list(keys.shape[:3])}, got {list(values.shape[:3])}"
        )
    if keys.device != values.device:
        raise ValueError(f"value_states must be on the device of key_states {keys.device}, got {values.device}")


def _check_continues(state: LayerState, keys: torch.Tensor, values: torch.Tensor) -> None:
    dense = state.dense
    for name, new, held in (("key_states", keys, dense.key_buffer), ("value_states", values, dense.value_buffer)):
        check_like(name, new, (held.shape[0], held.shape[1], held.shape[3]), held.dtype, held.device)


def _check_finite(keys: torch.Tensor, values: torch.Tensor) -> None:
    for name, x in (("key_states", keys), ("value_states", values)):
        broken = int((~x.isfinite().all(-1)).sum())
        if broken:
            raise ValueError(
                f"{name} must be finite, got NaN or infinity in {broken} token vectors (check_finite=True)"
            )
