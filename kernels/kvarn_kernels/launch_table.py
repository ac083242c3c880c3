"""How decode attention is launched, by architecture and shape: measured, and kept small enough to read.

``tools/tune_attention.py`` measures the candidates on the GPU at hand and prints the rows of :data:`TABLE`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch


class Tuning(NamedTuple):
    """One row of the table.

    programs : programs per multiprocessor that a launch aims at (the split of the context follows from it)
    block : dense tokens per step
    warps, stages : of every program
    registers : the most a thread may use; None leaves it to the compiler
    """

    programs: float
    block: int
    warps: int
    stages: int
    registers: int | None


class Launch(NamedTuple):
    """What a call needs: into how many slices the tiles and the dense tokens are cut, and the launch options."""

    splits: int
    dense_splits: int
    block: int
    warps: int
    stages: int
    registers: int | None


# (capability, query columns per program, the larger head_dim up to): the first row that fits is taken.
TABLE: tuple[tuple[tuple[int, int, int], Tuning], ...] = (
    ((9, 4, 128), Tuning(programs=14, block=16, warps=1, stages=2, registers=None)),
    ((9, 8, 128), Tuning(programs=8, block=16, warps=1, stages=2, registers=None)),
    ((9, 8, 256), Tuning(programs=8, block=16, warps=1, stages=2, registers=None)),
)
_OTHERWISE = Tuning(programs=8, block=16, warps=1, stages=2, registers=None)

_MOST_SPLITS = 128
_DENSE_TOKENS = 64  # per program, while the GPU is not full


@lru_cache(maxsize=4096)
def attention_launch(
    device: int | None, units: int, count: int, dense_length: int, columns: int, head_dim: int
) -> Launch:
    """The launch for ``units`` independent problems (batch x KV heads x blocks of query columns) of ``count`` tiles.

    Parameters
    ----------
    device : int, optional
        CUDA device; None for the interpreter.
    dense_length : int
        Dense tokens, best rounded up, so that few different values come in.
    columns : int
        Query columns per program.
    head_dim : int
        The larger of both padded head_dims.
    """
    major, multiprocessors = _device(device)
    fitting = (t for (arch, most, dim), t in TABLE if arch == major and columns <= most and head_dim <= dim)
    tuning = next(fitting, _OTHERWISE)
    return plan(tuning, units, count, dense_length, multiprocessors)


def plan(tuning: Tuning, units: int, count: int, dense_length: int, multiprocessors: int) -> Launch:
    """How ``tuning`` cuts one problem. All slices of tiles are equally long, give or take one tile."""
    programs = max(1, round(tuning.programs * multiprocessors / units))
    splits = min(count, programs, _MOST_SPLITS)
    if splits:  # no slice needs more tiles than the longest, so fewer slices may do
        longest = -(-count // splits)
        splits = -(-count // longest)
    dense_splits = min(-(-dense_length // _DENSE_TOKENS), max(1, programs // 2), 16)
    return Launch(splits, dense_splits, tuning.block, tuning.warps, tuning.stages, tuning.registers)


@lru_cache(maxsize=16)
def _device(index: int | None) -> tuple[int, int]:
    if index is None:
        return 0, 1
    properties = torch.cuda.get_device_properties(index)
    return properties.major, properties.multi_processor_count
