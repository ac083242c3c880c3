"""Dense tokens in buffers that are appended to in place."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

# Buffers grow by this many tokens, so that most decode steps append in place.
_GRANULE = 32


@dataclass(frozen=True)
class DenseTokens:
    """Keys and values of the dense tokens: buffers ``[batch, heads, capacity, head_dim]``, ``length`` of it in use.

    What was written to a buffer is never written over: :meth:`appended` writes in place only behind the last token
    that anybody has appended, so views and shorter states of the same buffer stay what they are.
    """

    key_buffer: torch.Tensor
    value_buffer: torch.Tensor
    length: int
    written: list[int]  # one number, shared by all that share the buffers: tokens that have been written

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor, length: int | None = None) -> DenseTokens:
        """These buffers, of which the first ``length`` tokens (None: all) are in use and nothing is free."""
        room = keys.shape[2]
        return cls(keys, values, room if length is None else length, [room])

    @classmethod
    def copied(cls, keys: torch.Tensor, values: torch.Tensor, room: int = 0) -> DenseTokens:
        """A copy in buffers of its own, with room for ``room`` more tokens."""
        length = keys.shape[2]
        capacity = -(-(length + room) // _GRANULE) * _GRANULE

        def copy(x: torch.Tensor) -> torch.Tensor:
            buffer = x.new_empty(*x.shape[:2], capacity, x.shape[3])
            buffer[:, :, :length] = x
            return buffer

        return cls(copy(keys), copy(values), length, [length])

    @property
    def keys(self) -> torch.Tensor:
        """``[batch, heads, length, key_dim]``."""
        return self.key_buffer[:, :, : self.length]

    @property
    def values(self) -> torch.Tensor:
        """``[batch, heads, length, value_dim]``."""
        return self.value_buffer[:, :, : self.length]

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """Every tensor held, by name."""
        return {"dense_keys": self.key_buffer, "dense_values": self.value_buffer}

    def with_parts(self, parts: dict[str, torch.Tensor]) -> DenseTokens:
        """The same tokens in other tensors, named as :attr:`parts` names them."""
        return DenseTokens(parts["dense_keys"], parts["dense_values"], self.length, [self.length])

    def appended(self, keys: torch.Tensor, values: torch.Tensor) -> DenseTokens:
        """With more tokens ``[batch, heads, tokens, head_dim]`` behind these; in place where that harms nobody."""
        length, target = self.length + keys.shape[2], self
        if length > self.key_buffer.shape[2] or self.written[0] != self.length:
            target = DenseTokens.copied(self.keys, self.values, room=keys.shape[2])
        target.key_buffer.narrow(2, self.length, keys.shape[2]).copy_(keys)
        target.value_buffer.narrow(2, self.length, keys.shape[2]).copy_(values)
        target.written[0] = length
        return replace(target, length=length)

    def truncated(self, length: int) -> DenseTokens:
        """The first ``length`` tokens."""
        return replace(self, length=length)
