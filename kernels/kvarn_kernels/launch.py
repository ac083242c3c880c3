"""What every launch needs to know about its tensors."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from kvarn_kernels.bundles import Side, constant

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


@cache
def side(
    is_key: bool, dim: int, bits: int = 16, rotated: bool = False, *, least: int = 16, chunk: int | None = None
) -> Side:
    """What a kernel is compiled for, of keys or of values.

    Parameters
    ----------
    is_key, dim, bits
        See :class:`kvarn_kernels.bundles.Side`.
    rotated : bool
        Whether tiles are stored rotated.
    least : int
        Channels to pad to at least.
    chunk : int, optional
        Channels to read at a time at most; None: all.
    """
    size = padded(dim, least)
    return Side(is_key, dim, size, min(size, chunk or size), rotation_block(dim) if rotated else 1, bits)


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
    constants : the ``constexpr`` arguments, bundles among them as they are
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


def _compile(call: Call) -> Any:
    kernel, arrays, numbers, varying, constants, *_ = call
    first: Any = arrays[0]
    with on_device_of(first):  # another thread may have another
        given = *arrays, *numbers, *(2,) * len(varying), *map(constant, constants)
        return kernel.warmup(*given, grid=(1,), **call.options)


# A fixed-size cache begins to compile its kernels while the prompt is read: on an H200 with Llama-3.1-8B's shape and
# empty compilation caches, the first decode step then takes 21 s instead of 29 s. That is once on every machine; with
# full caches it saves half a second.
_COMING: dict[Any, Future[object]] = {}  # by kernel, the last that was begun
_COMPILER = ThreadPoolExecutor(1, thread_name_prefix="kvarn-compile")  # its thread starts with the first task


def begin(kernel: Any, work: Callable[[], object]) -> None:
    """Begin to compile a kernel in another thread; ``work`` compiles it. Most of that time is spent outside of Python,
    so the caller goes on meanwhile."""
    _COMING[kernel] = _COMPILER.submit(work)


def compiling(kernel: Any) -> bool:
    """Whether what :func:`begin` began goes on."""
    return kernel in _COMING and not _COMING[kernel].done()


def finish(kernel: Any) -> None:
    """Wait for what :func:`begin` began; what failed there fails again where it is needed."""
    if kernel in _COMING:
        wait([_COMING[kernel]])


def compile_ahead(call: Call) -> None:
    """Begin to compile what :func:`launch` will need for such a call; a launch that needs it waits."""
    if call.arrays[0].is_cuda:  # type: ignore[union-attr]
        begin(call.kernel, partial(_compile, call))
