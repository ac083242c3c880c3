"""What every launch needs to know about its tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below ``n``."""
    return 1 << (n - 1).bit_length()


def padded(dim: int, least: int = 16) -> int:
    """The power of two that a tile's side is padded to; ``least`` is what a tensor-core product takes."""
    return max(least, power_of_two(dim))


def rotation_block(dim: int) -> int:
    """The largest power of two that divides ``dim``: the order of the Hadamard blocks."""
    return dim & -dim


def on_device_of(x: torch.Tensor) -> AbstractContextManager[object]:
    """The context in which a launch runs on the GPU that holds ``x``, whichever is current."""
    # Entering the context costs microseconds, and is needed only when another GPU is current.
    other = x.is_cuda and x.device.index != torch.cuda.current_device()
    return torch.cuda.device(x.device) if other else nullcontext()
