"""Measure launch options of the fused decode attention on the GPU at hand and print the rows of its launch table.

    python tools/tune_attention.py [--seconds 240] [--shapes 8,32768,8,4,128 ...]

Prints the best of every shape, best first. A configuration that gives wrong results is reported and never timed.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "kernels")]

import torch  # noqa: E402

from kvarn_hf.bench import attention as bench  # noqa: E402
from kvarn_hf.bench.inputs import stored_bytes  # noqa: E402
from kvarn_hf.bench.timing import milliseconds  # noqa: E402
from kvarn_kernels.launch_table import Tuning  # noqa: E402

PRESET = "kvarn_k4v2_g128"
WEIGHTS = (3, 4, 6)
REGISTERS = (None, 128, 168)


def options(weights: Iterable[int] = WEIGHTS) -> list[Tuning]:
    """The candidates."""
    every = itertools.product((16, 32), weights, (1,), (2, 3), REGISTERS, (2, 3))
    return [*itertools.starmap(Tuning, every), Tuning(16, 4, 2, 2, None, 2)]


def compile_one(job: tuple[bench.Shape, Tuning]) -> None:
    """Fill Triton's cache on disk, in a process of its own."""
    shape, tuning = job
    inputs = bench.Inputs.random(shape._replace(batch=1, context=1024), PRESET)
    try:
        inputs.attend(tuning)
        torch.cuda.synchronize()
    except Exception as error:  # the main process reports it
        print(f"cannot run {tuning}: {type(error).__name__}", flush=True)


def tune(shape: bench.Shape, candidates: Iterable[Tuning], deadline: float) -> None:
    """Measure ``candidates`` until ``deadline`` (of the monotonic clock)."""
    first = bench.Inputs.random(shape, PRESET)
    sets = bench.Inputs.cold(shape, PRESET, first)
    size = stored_bytes(first.state) / 1e6
    results = []
    for tuning in candidates:
        if time.monotonic() > deadline:
            break
        try:
            bench.error_of(first, tuning)
            elapsed = milliseconds([partial(inputs.attend, tuning) for inputs in sets], replays=7)
        except Exception as error:
            print(f"  {tuning}: {type(error).__name__} {error}"[:200], flush=True)
            continue
        results.append((elapsed * 1e3, tuning))
    print(f"{shape}  {size:.1f} MB")
    results.sort(key=lambda r: r[0])
    for elapsed, tuning in results[:8]:
        print(f"  {elapsed:7.1f} us  {size / elapsed:.2f} TB/s  {tuning}")
    if results:
        row = torch.cuda.get_device_capability()[0], 4 if shape.groups <= 4 else 8, shape.head_dim
        print(f"    ({row}, {results[0][1]}),", flush=True)


def main() -> None:
    """Compile every candidate, then measure them shape by shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0, help="stop measuring after this long")
    every = [",".join(map(str, shape)) for shape in bench.SHAPES]
    parser.add_argument("--shapes", nargs="*", default=every, help="as in the bench")
    parser.add_argument("--workers", type=int, default=8, help="processes that compile")
    arguments = parser.parse_args()
    start = time.monotonic()
    shapes = [bench.Shape(*map(int, text.split(","))) for text in arguments.shapes]
    jobs = [(shape, tuning) for shape in {(s.groups, s.head_dim): s for s in shapes}.values() for tuning in options()]
    with multiprocessing.get_context("spawn").Pool(arguments.workers) as pool:
        pool.map(compile_one, jobs, chunksize=1)
    print(f"{len(jobs)} kernels compiled in {time.monotonic() - start:.0f} s", flush=True)
    for i, shape in enumerate(shapes):
        left = start + arguments.seconds - time.monotonic()
        tune(shape, options(), time.monotonic() + max(0.0, left) / (len(shapes) - i))


if __name__ == "__main__":
    main()
