"""What every launch needs to know about its tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def padded(dim: int) -> int:
    """The power of two that a tile's side is padded to, and at least what a tensor-core product takes."""
    return max(16, 1 << (dim - 1).bit_length())


def rotation_block(dim: int) -> int:
    """The largest power of two that divides ``dim``: the order of the Hadamard blocks."""
    return dim & -dim


def on_device_of(x: torch.Tensor) -> AbstractContextManager[object]:
    """The context in which a launch runs on the GPU that holds ``x``, whichever is current."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
