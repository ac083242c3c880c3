"""What every launch needs to know about its tensors."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import torch

RESERVED_SHARED = 1024  # bytes of a multiprocessor's shared memory, for every program that it runs


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below ``n``."""
    return 1 << (n - 1).bit_length()


def padded(dim: int, least: int = 16) -> int:
    """The power of two that a tile's side is padded to; ``least`` is what a tensor-core product takes."""
    return max(least, power_of_two(dim))


def warps_for(elements: int) -> int:
    """64 elements of a tile to a thread, as far as 16 warps go: a tile and its codes fit the registers, and little is
    exchanged."""
    return min(16, max(4, elements // 2048))


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


class Call(NamedTuple):
    """A kernel and all that it is called with.

    kernel : triton.JITFunction; takes ``arrays``, ``numbers``, ``varying`` and ``constants``, in this order
    arrays : pointers
    numbers : what it is compiled for: Triton looks whether they are 1 or divisible by 16
    varying : those for which it is not, below 2**31; the kernel names them in ``do_not_specialize``
    constants : the ``constexpr`` arguments
    warps, stages : of every program
    """

    kernel: Any
    arrays: tuple[torch.Tensor | None, ...]
    numbers: tuple[int, ...]
    varying: tuple[int, ...]
    constants: tuple[Any, ...]
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        """As Triton takes them."""
        return {"num_warps": self.warps, "num_stages": self.stages}


# Compiled kernels by all that they were compiled for.
_COMPILED: dict[tuple[Any, ...], Any] = {}
_MOST_COMPILED = 1024  # strides and alignments differ
# What is being compiled in a thread of its own, by kernel, or was, and nobody has waited for it.
_COMING: dict[Any, Future[object]] = {}


@cache
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="kvarn-compile")


def launch(call: Call, grid: tuple[int, ...]) -> None:
    """Launch a Triton kernel on the GPU of its first array; Triton's own look-up takes several times as long.

    Parameters
    ----------
    call : Call
        What is launched.
    grid : tuple of int
        Programs.
    """
    kernel, arrays, numbers, varying, constants, *options = call
    first: Any = arrays[0]
    if not first.is_cuda:  # interpreted
        kernel[grid](*arrays, *numbers, *varying, *constants, **call.options)
        return
    addresses = tuple([0 if x is None else x.data_ptr() for x in arrays])
    key = (
        kernel,
        first.device.index,
        tuple([None if x is None else (x.dtype, address & 15) for x, address in zip(arrays, addresses, strict=True)]),
        numbers,
        constants,
        *options,
    )
    with on_device_of(first):
        compiled = _COMPILED.get(key)
        if compiled is None:
            if len(_COMPILED) >= _MOST_COMPILED:
                _COMPILED.clear()
            finish(kernel)
            # From Triton's own table, if that was it.
            compiled = _COMPILED[key] = _compile(call)
        # Compiled kernels take addresses.
        compiled[(*grid, 1, 1)[:3]](*addresses, *numbers, *varying, *constants)


def begin(kernel: Any, work: Callable[[], object]) -> None:
    """Begin to compile a kernel in a thread of its own, until :func:`finish`; ``work`` compiles it.

    Most of the time is spent outside of Python, so other work goes on meanwhile.
    """
    _COMING[kernel] = _compilers().submit(work)


def compiling(kernel: Any) -> bool:
    """Whether what :func:`begin` began goes on."""
    coming = _COMING.get(kernel)
    return coming is not None and not coming.done()


def finish(kernel: Any) -> None:
    """Wait for what :func:`begin` began."""
    coming = _COMING.get(kernel)
    if coming is not None:
        wait([coming])
        if _COMING.get(kernel) is coming:  # others may have waited too
            _COMING.pop(kernel, None)


def compile_ahead(call: Call) -> None:
    """Begin to compile what :func:`launch` will need for such a call. The next launch of the kernel that is not
    compiled yet waits for it."""
    first: Any = call.arrays[0]
    if first.is_cuda:
        begin(call.kernel, partial(_compile, call))


def _compile(call: Call) -> Any:
    kernel, arrays, numbers, varying, constants, *_ = call
    first: Any = arrays[0]
    with on_device_of(first):  # another thread may have another
        return kernel.warmup(*arrays, *numbers, *(2,) * len(varying), *constants, grid=(1,), **call.options)
