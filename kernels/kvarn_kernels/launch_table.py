"""How decode attention is launched, by architecture and shape: measured, and kept small enough to read.

``tools/tune_attention.py`` measures the candidates on the GPU at hand and prints the rows of :data:`TABLE`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from kvarn_kernels.launch import RESERVED_SHARED


class Tuning(NamedTuple):
    """One row of the table.

    block : dense tokens per step
    weight : how many such steps take as long as two tiles
    warps, stages : of every program
    registers : the most a thread may use; None leaves it to the compiler
    dense_stages : of the loop over dense tokens
    """

    block: int
    weight: int
    warps: int
    stages: int
    registers: int | None
    dense_stages: int


# (capability, query columns per program, the larger head_dim up to): the first row that fits is taken. On an H200 no
# shape gains more than 1 % by a row of its own.
TABLE: tuple[tuple[tuple[int, int, int], Tuning], ...] = (
    ((9, 8, 256), Tuning(block=16, weight=4, warps=1, stages=2, registers=None, dense_stages=2)),
)
_OTHERWISE = TABLE[0][1]

# Without a GPU: the interpreter runs one program after the other.
_INTERPRETED_PROGRAMS = 16
# Every architecture that the kernels run on has these.
_REGISTERS, _SCHEDULERS, _MOST_PROGRAMS = 65536, 4, 32


@lru_cache(maxsize=256)
def tuning_for(device: int | None, columns: int, head_dim: int) -> Tuning:
    """The row of :data:`TABLE` for a CUDA device (None: the interpreter), columns per program and padded head_dim."""
    major = 0 if device is None else torch.cuda.get_device_properties(device).major
    fitting = (t for (arch, most, dim), t in TABLE if arch == major and columns <= most and head_dim <= dim)
    return next(fitting, _OTHERWISE)


def programs_at_once(kernel: Any, device: int | None) -> int:
    """How many programs of a compiled kernel the GPU holds at the same time."""
    if device is None:
        return _INTERPRETED_PROGRAMS
    properties = torch.cuda.get_device_properties(device)
    warps, registers_of_warp = kernel.metadata.num_warps, -(-kernel.n_regs * 32 // 256) * 256
    # Every scheduler has registers of its own.
    by_registers = _REGISTERS // _SCHEDULERS // registers_of_warp * _SCHEDULERS // warps
    by_shared = properties.shared_memory_per_multiprocessor // (kernel.metadata.shared + RESERVED_SHARED)
    return max(1, min(by_registers, by_shared, _MOST_PROGRAMS)) * properties.multi_processor_count
