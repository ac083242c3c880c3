"""What attention reads in one step, and keys and values that are dequantized only when something else touches them.

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
LAZY_ATTENTION = ("sdpa", "kvarn")

Shape = tuple[int, int, int, int]


def reads_lazily(model_config: Any) -> bool:
    """Whether a model with this config hands keys to an attention that knows, or at least touches, lazy tensors."""
    return getattr(model_config, "_attn_implementation", None) in LAZY_ATTENTION


class StateSource:
    """The state of a growing layer before a step's tiles are packed, as a :class:`Reading` reads it."""

    def __init__(self, state: LayerState) -> None:
        self.state, keys, values = state, state.dense.key_buffer, state.dense.value_buffer
        lead = (*keys.shape[:2], state.length)
        self.shapes = (*lead, keys.shape[3]), (*lead, values.shape[3])
        self.dtype, self.device = keys.dtype, keys.device

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, dequantized, of these ``shapes``."""
        return ops.dense(self.state)

    def attend(self, query: torch.Tensor, mask: torch.Tensor | None, **options: Any) -> torch.Tensor | None:
        """See :func:`kvarn_hf.ops.attend`."""
        return ops.attend(self.state, query, mask, **options)


class Reading:
    """What one step of one layer reads, and the dense tensors if anybody has asked for them.

    ``source`` is a :class:`StateSource`, or a fixed layer's. ``counts`` is the layer's ``{"fused": n, "dequantized":
    n}``; None in compiled code, which would be compiled again for every other number.
    """

    def __init__(self, source: Any, counts: dict[str, int] | None) -> None:
        self.source, self.counts = source, counts
        self._dense: tuple[torch.Tensor, torch.Tensor] | None = None

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, dequantized at the first call."""
        if self._dense is None:
            self._dense = self.source.dense()
            self._count("dequantized")
        return self._dense

    def attend(self, query: torch.Tensor, mask: torch.Tensor | None, **options: Any) -> torch.Tensor | None:
        """Fused attention, see :func:`kvarn_hf.ops.attend`; None where only dense tensors will do."""
        if self._dense is not None:
            return None  # whoever asked for them may have changed them
        out: torch.Tensor | None = self.source.attend(query, mask, **options)
        if out is not None:
            self._count("fused")
        return out

    def lazy(self) -> tuple[LazyStates, LazyStates]:
        """Keys and values that stay without data as long as nobody needs it."""
        return LazyStates(self, False), LazyStates(self, True)

    def _count(self, kind: str) -> None:
        if self.counts is not None:
            self.counts[kind] += 1


_WITH_GROUPS = (slice(None), slice(None), None, slice(None), slice(None))


class LazyStates:
    """Dense keys (or values) to be, ``[batch, heads * repeats, length, head_dim]``.

    ``grouped`` is the shape on the way there, ``[batch, heads, repeats, length, head_dim]``: Transformers repeats KV
    heads by ``x[:, :, None, :, :].expand(...).reshape(...)``, and none of these needs data.

    A plain class and no subclass of torch.Tensor: compiled code takes objects, but no tensors without data.
    """

    def __init__(self, reading: Reading, is_value: bool, repeats: int = 1, grouped: bool = False) -> None:
        self.reading, self.is_value, self.repeats, self.grouped = reading, is_value, repeats, grouped
        self.side = 1 if is_value else 0  # not every compiler of torch's takes a bool as an index
        batch, heads, length, head_dim = reading.source.shapes[self.side]
        groups = (heads, repeats) if grouped else (heads * repeats,)
        self.shape = (batch, *groups, length, head_dim)
        self.ndim = len(self.shape)
        self.dtype, self.device = reading.source.dtype, reading.source.device
        self._copy: torch.Tensor | None = None

    requires_grad = False

    @property
    def heads(self) -> int:
        """KV heads, not repeated."""
        return self.reading.source.shapes[self.side][1]

    @property
    def is_cuda(self) -> bool:
        """See :attr:`torch.Tensor.is_cuda`."""
        return self.device.type == "cuda"

    def dense(self) -> torch.Tensor:
        """The tensor itself."""
        tensor = self.reading.dense()[self.side]
        if self.grouped:
            return tensor.unsqueeze(2).expand(self.shape)
        if self.repeats == 1:
            return tensor
        if self._copy is None:  # once: it may be changed in place
            self._copy = tensor.repeat_interleave(self.repeats, 1)
        return self._copy

    def size(self, dim: int | None = None) -> Any:
        """See :meth:`torch.Tensor.size`."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """See :meth:`torch.Tensor.dim`."""
        return self.ndim

    def expand(self, *sizes: int) -> Any:
        """See :meth:`torch.Tensor.expand`."""
        kept = (*sizes[:2], *sizes[3:]) == (*self.shape[:2], *self.shape[3:])
        if self.grouped and self.repeats == 1 and kept:
            return LazyStates(self.reading, self.is_value, sizes[2], True)
        return self.dense().expand(*sizes)

    def reshape(self, *sizes: int) -> Any:
        """See :meth:`torch.Tensor.reshape`."""
        if self.grouped and sizes == (self.shape[0], self.shape[1] * self.shape[2], *self.shape[3:]):
            return LazyStates(self.reading, self.is_value, self.repeats)
        return self.dense().reshape(*sizes)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple) and index == _WITH_GROUPS and not self.grouped and self.repeats == 1:
            return LazyStates(self.reading, self.is_value, 1, True)
        return self.dense()[index]

    def __getattr__(self, name: str) -> Any:
        # Whatever else a tensor has, for models that change keys and values before attention.
        if name.startswith("__"):  # asked by Python itself, of the class
            raise AttributeError(name)
        return getattr(self.dense(), name)

    def __repr__(self) -> str:
        return f"LazyStates({'values' if self.is_value else 'keys'}, shape={list(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            out = attend_lazily(*args, **kwargs)
            if out is not None:
                return out
        args, kwargs = tree_map_only(LazyStates, LazyStates.dense, (args, kwargs))
        return func(*args, **kwargs)


def _operator(name: str) -> Any:
    def operator(self: LazyStates, *args: Any) -> Any:
        return getattr(self.dense(), name)(*args)

    return operator


# Python looks operators up in the class, not by __getattr__.
for _name in (
    *("add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "truediv", "rtruediv", "itruediv"),
    *("pow", "rpow", "matmul", "rmatmul", "neg", "abs", "eq", "ne", "lt", "le", "gt", "ge", "len", "iter", "setitem"),
):
    setattr(LazyStates, f"__{_name}__", _operator(f"__{_name}__"))


def dense(states: Any) -> torch.Tensor:
    """Keys or values as a plain tensor."""
    return states.dense() if isinstance(states, LazyStates) else states


def reading_of(key: Any, value: Any) -> Reading | None:
    """The reading that lazy keys and values stand for; None if they are no such pair."""
    if not (isinstance(key, LazyStates) and isinstance(value, LazyStates)):
        return None
    matching = key.reading is value.reading and key.repeats == value.repeats
    plain = not (key.is_value or key.grouped or value.grouped) and value.is_value
    return key.reading if matching and plain else None


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
    if reading is None or isinstance(query, LazyStates) or dropout_p or is_causal or query.ndim != 4:
        return None
    batch, query_heads, tokens, head_dim = query.shape
    heads, length = key.heads, key.shape[2]
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
