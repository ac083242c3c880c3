"""What every launch needs to know about its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

RESERVED_SHARED = 1024  # bytes of a multiprocessor's shared memory, for every program that it runs


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


@cache
def shared_memory(device: int | None) -> int:
    """Bytes of shared memory that one program may take on a CUDA device; without one (None) there is no limit."""
    if device is None:
        return 1 << 30
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor - RESERVED_SHARED


# Compiled kernels by all that they were compiled for.
_COMPILED: dict[tuple[Any, ...], Any] = {}
_MOST_COMPILED = 1024  # strides and alignments differ
# What is being compiled in a thread of its own, by kernel.
_COMING: dict[Any, Future[object]] = {}


@cache
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="kvarn-compile")


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    arrays: Sequence[torch.Tensor | None],
    numbers: tuple[int, ...],
    varying: tuple[int, ...],
    constants: tuple[Any, ...],
    **options: Any,
) -> None:
    """Launch a Triton kernel on the GPU of its first array; Triton's own look-up takes several times as long.

    Parameters
    ----------
    kernel : triton.JITFunction
        Takes ``arrays``, ``numbers``, ``varying`` and ``constants``, in this order.
    grid : tuple of int
        Programs.
    arrays : sequence of torch.Tensor or None
        Pointers.
    numbers : tuple of int
        What it is compiled for: Triton looks whether they are 1 or divisible by 16.
    varying : tuple of int
        Those for which it is not, below 2**31; the kernel names them in ``do_not_specialize``.
    constants : tuple
        The ``constexpr`` arguments.
    options
        num_warps, num_stages, maxnreg.
    """
    first: Any = arrays[0]
    if not first.is_cuda:  # interpreted
        kernel[grid](*arrays, *numbers, *varying, *constants, **options)
        return
    addresses = tuple([0 if x is None else x.data_ptr() for x in arrays])
    key = (
        kernel,
        first.device.index,
        tuple([None if x is None else (x.dtype, address & 15) for x, address in zip(arrays, addresses, strict=True)]),
        numbers,
        constants,
        *options.values(),
    )
    with on_device_of(first):
        compiled = _COMPILED.get(key)
        if compiled is None:
            if len(_COMPILED) >= _MOST_COMPILED:
                _COMPILED.clear()
            if kernel in _COMING:
                wait([_COMING.pop(kernel)])
            # From Triton's own table, if that was it.
            compiled = _COMPILED[key] = _compile(kernel, arrays, numbers, varying, constants, options)
        # Compiled kernels take addresses.
        compiled[(*grid, 1, 1)[:3]](*addresses, *numbers, *varying, *constants)


def compile_ahead(
    kernel: Any,
    grid: tuple[int, ...],
    arrays: Sequence[torch.Tensor | None],
    numbers: tuple[int, ...],
    varying: tuple[int, ...],
    constants: tuple[Any, ...],
    **options: Any,
) -> None:
    """Begin to compile what :func:`launch` will need for such arguments, in a thread of its own.

    Most of the time is spent outside of Python, so other work goes on meanwhile. The next launch of the kernel that is
    not compiled yet waits for it.
    """
    first: Any = arrays[0]
    if first.is_cuda:
        work = (kernel, arrays, numbers, varying, constants, options)
        _COMING[kernel] = _compilers().submit(_compile, *work)


def _compile(
    kernel: Any,
    arrays: Sequence[torch.Tensor | None],
    numbers: tuple[int, ...],
    varying: tuple[int, ...],
    constants: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    first: Any = arrays[0]
    with on_device_of(first):  # another thread may have another
        return kernel.warmup(*arrays, *numbers, *(2,) * len(varying), *constants, grid=(1,), **options)
