"""How attention reads a static layer: fused where it can be, eagerly and in compiled code.

The lengths of what it reads are the layer's room, ``max_cache_len``: only the device knows how many tokens there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_map_only

from kvarn_hf.layers.lazy import attend_lazily, repetition
from kvarn_hf.ops import steps as static


class StaticReading:
    """What attention reads in one step of a static layer; the counterpart of :class:`kvarn_hf.layers.lazy.Reading`.

    ``layout`` is a :attr:`kvarn_hf.ops.steps.Layout.text`, ``shapes`` are those of the dense keys and values, and
    ``counts`` is the layer's ``{"fused": n, "dequantized": n}``; None in compiled code, which would be compiled again
    for every other number. ``token`` is the newest key and value, ``[batch, heads, 1, head_dim]``. If they are not
    ``written``, what reads first writes them. Attention does that without a launch more, and at no cost if they are.
    """

    def __init__(
        self,
        storage: torch.Tensor,
        progress: torch.Tensor,
        row: int,
        layout: str,
        shapes: tuple[Any, ...],
        dtype: torch.dtype,
        counts: dict[str, int] | None,
        token: tuple[torch.Tensor, torch.Tensor],
        written: bool,
    ) -> None:
        self.storage, self.progress, self.row, self.layout = storage, progress, row, layout
        self.shapes, self.dtype = shapes, dtype
        self.counts = counts
        self._token, self._written = token, written
        self._changes, self._change = [0], 0
        self._dense: tuple[torch.Tensor, torch.Tensor] | None = None

    def expire_after(self, changes: list[int]) -> None:
        """Let attention write the token no more once the layer changes again, which counts that here."""
        self._changes, self._change = changes, changes[0]

    @property
    def device(self) -> torch.device:
        return self.storage.device

    @property
    def heads(self) -> int:
        return self.shapes[0][1]  # type: ignore[no-any-return]

    def shape(self, is_value: bool) -> tuple[int, int, int, int]:
        """Of the dense keys or values."""
        return self.shapes[1 if is_value else 0]  # type: ignore[no-any-return]

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, dequantized, ``[batch, heads, max_cache_len, head_dim]``."""
        if self._dense is None:
            if not self._written:
                static.write(self.storage, self.progress, self.row, *self._token, self.layout)
                self._written = True
            self._dense = static.read(self.storage, self.progress, self.row, self.layout)
            if self.counts is not None:
                self.counts["dequantized"] += 1
        return self._dense

    def attend(
        self,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Fused attention; None where it is not supported, and where the dense tensors have been handed out, and may
        have been changed."""
        if self._dense is not None or query.dtype != self.dtype or (query.requires_grad and torch.is_grad_enabled()):
            return None
        if mask is not None and mask.shape[-1] < self.shapes[0][2]:
            return None  # it may end before the tokens do
        if self.counts is not None:
            self.counts["fused"] += 1
        scaling = query.shape[3] ** -0.5 if scaling is None else scaling
        token = self._token if self._changes[0] == self._change else (None, None)
        self._written = True
        held = self.storage, self.progress, self.row
        return static.attend(query, *token, *held, mask, sinks, self.layout, scaling, softcap or 0.0)


class TracedStates:
    """:class:`~kvarn_hf.layers.lazy.LazyStates` for compiled code, which takes objects but no tensors without data."""

    def __init__(self, reading: StaticReading, is_value: bool, repeats: int = 1, grouped: bool = False) -> None:
        self.reading, self.is_value, self.repeats, self.grouped = reading, is_value, repeats, grouped
        batch, heads, length, head_dim = reading.shape(is_value)
        self.shape = (
            (batch, heads, repeats, length, head_dim) if grouped else (batch, heads * repeats, length, head_dim)
        )
        self.ndim = len(self.shape)
        self.dtype, self.device = reading.dtype, reading.device

    def dense(self) -> torch.Tensor:
        """The tensor itself."""
        tensor = self.reading.dense()[1 if self.is_value else 0]
        if self.grouped:
            return tensor.unsqueeze(2).expand(self.shape)
        return tensor.repeat_interleave(self.repeats, 1) if self.repeats > 1 else tensor

    def __getattr__(self, name: str) -> Any:
        # Whatever else a tensor has, for models that change keys and values before attention.
        return getattr(self.dense(), name)

    def __getitem__(self, index: Any) -> Any:
        repeated = self._repeated("getitem", (index,))
        return self.dense()[index] if repeated is None else repeated

    def expand(self, *sizes: int) -> Any:
        """See :meth:`torch.Tensor.expand`."""
        repeated = self._repeated("expand", sizes)
        return self.dense().expand(*sizes) if repeated is None else repeated

    def reshape(self, *sizes: int) -> Any:
        """See :meth:`torch.Tensor.reshape`."""
        repeated = self._repeated("reshape", sizes)
        return self.dense().reshape(*sizes) if repeated is None else repeated

    def _repeated(self, call: str, arguments: tuple[Any, ...]) -> TracedStates | None:
        found = repetition(call, arguments, self.shape, self.repeats, self.grouped)
        return None if found is None else TracedStates(self.reading, self.is_value, *found)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            out = attend_lazily(*args, **kwargs)
            if out is not None:
                return out
        args, kwargs = tree_map_only(TracedStates, TracedStates.dense, (args, kwargs))
        return func(*args, **kwargs)
