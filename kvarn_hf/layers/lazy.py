"""Keys and values that are dequantized only when something other than a fused attention touches them.

``update()`` must hand back tensors. For a decode step it hands back a pair of :class:`LazyStates`: shape, dtype and
device of the dense keys and values, and no data. ``scaled_dot_product_attention`` called with such a pair reads the
packed tiles directly; whatever else touches one finds a dense tensor, dequantized once and remembered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_map_only

from kvarn_hf import ops
from kvarn_hf.state.layer_state import LayerState

# Attention implementations of Transformers that read them, or at least touch them as tensors.
reads_lazily = ("sdpa", "kvarn")

# What can be answered without data.
_METADATA = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.is_floating_point,
    torch.Tensor.__len__,
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "is_cuda", "is_cpu", "layout", "requires_grad", "is_leaf")
    ),
}


# ``x[:, :, None, :, :].expand(...).reshape(...)`` is how Transformers repeats KV heads.
_REPEATING = {
    torch.Tensor.__getitem__: "getitem",
    torch.Tensor.expand: "expand",
    torch.Tensor.reshape: "reshape",
}
_WITH_GROUPS = (slice(None), slice(None), None, slice(None), slice(None))


def repetition(
    call: str, arguments: tuple[Any, ...], shape: tuple[int, ...], repeats: int, grouped: bool
) -> tuple[int, bool] | None:
    """Repeats, and whether they have a dimension of their own, after a step of repeating KV heads, which needs no data.

    ``call`` is "getitem", "expand" or "reshape", of states with this ``shape``; None for any other step.
    """
    if call == "getitem":
        return (1, True) if arguments == (_WITH_GROUPS,) and not grouped and repeats == 1 else None
    if not grouped:
        return None
    if call == "expand":
        kept = (*arguments[:2], *arguments[3:]) == (*shape[:2], *shape[3:])
        return (arguments[2], True) if kept and repeats == 1 else None
    return (repeats, False) if arguments == (shape[0], shape[1] * shape[2], *shape[3:]) else None


class Reading:
    """What one step of one layer reads: its state before the commit, and the dense tensors if anybody asked for them.

    ``counts`` is the layer's ``{"fused": n, "dequantized": n}``.
    """

    __slots__ = ("_dense", "counts", "state")

    def __init__(self, state: LayerState, counts: dict[str, int]) -> None:
        self.state = state
        self.counts = counts
        self._dense: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.state.dense.key_buffer.dtype

    @property
    def device(self) -> torch.device:
        return self.state.dense.key_buffer.device

    @property
    def heads(self) -> int:
        return self.state.dense.key_buffer.shape[1]

    def shape(self, is_value: bool) -> tuple[int, int, int, int]:
        """Of the dense keys or values."""
        like = self.state.dense.value_buffer if is_value else self.state.dense.key_buffer
        return like.shape[0], like.shape[1], self.state.length, like.shape[3]

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, dequantized at the first call."""
        if self._dense is None:
            self._dense = ops.dense(self.state)
            self.counts["dequantized"] += 1
        return self._dense

    def attend(self, query: torch.Tensor, mask: torch.Tensor | None, **options: Any) -> torch.Tensor | None:
        """Fused attention, see :func:`kvarn_hf.ops.attend`; None where it is not supported."""
        if self._dense is not None:
            return None  # whoever asked for them may have changed them
        out = ops.attend(self.state, query, mask, **options)
        if out is not None:
            self.counts["fused"] += 1
        return out


class LazyStates(torch.Tensor):
    """Dense keys (or values) to be, ``[batch, heads * repeats, length, head_dim]``.

    ``grouped`` is the shape on the way there, ``[batch, heads, repeats, length, head_dim]``: Transformers repeats KV
    heads by indexing, expanding and reshaping, and none of these needs data.
    """

    reading: Any  # a Reading, or a static layer's
    is_value: bool
    repeats: int
    grouped: bool
    _copy: torch.Tensor | None = None

    @staticmethod
    def pair(reading: Any) -> tuple[LazyStates, LazyStates]:
        """Keys and values of one reading."""
        return LazyStates._make(reading, False), LazyStates._make(reading, True)

    @staticmethod
    def _make(reading: Any, is_value: bool, repeats: int = 1, grouped: bool = False) -> LazyStates:
        batch, heads, length, head_dim = reading.shape(is_value)
        groups = (heads, repeats) if grouped else (heads * repeats,)
        lazy = torch.Tensor._make_wrapper_subclass(
            LazyStates, (batch, *groups, length, head_dim), dtype=reading.dtype, device=reading.device
        )
        lazy.reading, lazy.is_value, lazy.repeats, lazy.grouped = reading, is_value, repeats, grouped
        return lazy

    def dense(self) -> torch.Tensor:
        """The tensor itself."""
        tensor = self.reading.dense()[self.is_value]
        if self.grouped:
            return tensor.unsqueeze(2).expand(self.shape)
        if self.repeats == 1:
            return tensor
        if self._copy is None:  # once: it may be changed in place
            self._copy = tensor.repeat_interleave(self.repeats, 1)
        return self._copy

    def _repeating(self, func: Any, arguments: tuple[Any, ...]) -> LazyStates | None:
        """What one of the three steps of repeating KV heads gives; None for any other call."""
        found = repetition(_REPEATING[func], arguments, tuple(self.shape), self.repeats, self.grouped)
        return None if found is None else LazyStates._make(self.reading, self.is_value, *found)

    def __repr__(self) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"LazyStates({'values' if self.is_value else 'keys'}, shape={list(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _REPEATING and isinstance(args[0], LazyStates) and not kwargs:
            repeated = args[0]._repeating(func, args[1:])
            if repeated is not None:
                return repeated
        if func is scaled_dot_product_attention:
            out = attend_lazily(*args, **kwargs)
            if out is not None:
                return out
        args, kwargs = tree_map_only(LazyStates, LazyStates.dense, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Reached from C++ code that looks through the subclass.
        args, kwargs = tree_map_only(LazyStates, LazyStates.dense, (args, kwargs or {}))
        return func(*args, **kwargs)


def is_lazy(states: Any) -> bool:
    """Whether these are keys or values without data: :class:`LazyStates`, or what stands for them in compiled code."""
    return hasattr(states, "reading")


def dense(states: Any) -> torch.Tensor:
    """Keys or values as a plain tensor."""
    return states.dense() if is_lazy(states) else states


def reading_of(key: Any, value: Any) -> Any:
    """The reading that lazy keys and values stand for; None if they are no such pair."""
    if is_lazy(key) and is_lazy(value):
        matching = key.reading is value.reading and key.repeats == value.repeats
        matching = matching and not (key.is_value or key.grouped or value.grouped) and value.is_value
        return key.reading if matching else None
    return None


def attend_lazily(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """``scaled_dot_product_attention`` over packed tiles; None for what only the dense path can do."""
    reading = reading_of(key, value)
    if reading is None or is_lazy(query) or dropout_p or is_causal or query.ndim != 4:
        return None
    batch, query_heads, tokens, head_dim = query.shape
    heads, length = reading.heads, key.shape[2]
    if (batch, head_dim, query.dtype) != (key.shape[0], key.shape[3], key.dtype):
        return None
    if query_heads % heads or (query_heads != heads * key.repeats and not enable_gqa):
        return None
    if attn_mask is not None:
        allowed = ((1, batch), (1, query_heads), (1, tokens), (length,))
        if attn_mask.ndim != 4 or any(n not in sizes for n, sizes in zip(attn_mask.shape, allowed, strict=True)):
            return None
    if tokens > 1 and (attn_mask is None or attn_mask.shape[2] == 1):
        # Every query sees the same keys: heads packed as tokens. They are heads again.
        if attn_mask is not None and attn_mask.shape[1] != 1:
            return None
        out = reading.attend(query.reshape(batch, query_heads * tokens, 1, head_dim), attn_mask, scaling=scale)
        return None if out is None else out.reshape(batch, query_heads, tokens, out.shape[-1])
    out = reading.attend(query, attn_mask, scaling=scale)
    return None if out is None else out.transpose(1, 2)
