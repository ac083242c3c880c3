"""Measure launch options of the fused decode attention on the GPU at hand and print the rows of its launch table.

    python tools/tune_attention.py [--seconds 240] [--shapes 8,32768,8,4,128 ...]

Prints every measurement as it is made, best first at the end of each shape. A configuration that gives wrong results is
reported and never timed.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "kernels")]

import torch  # noqa: E402

from kvarn_hf import bench_attention as bench  # noqa: E402
from kvarn_kernels.launch_table import Tuning, plan  # noqa: E402

PRESET = "kvarn_k4v2_g128"
BLOCKS, STAGES, REGISTERS = (16, 32), (2, 3), (None, 168, 112)
PROGRAMS = (7, 8, 10, 12, 14, 16, 20, 28)


def options() -> list[Tuning]:
    """Everything that needs a kernel of its own."""
    one_warp = [
        Tuning(8, block, 1, stages, registers) for registers, stages, block in itertools.product(REGISTERS, STAGES, BLOCKS)
    ]
    return [*one_warp, Tuning(8, 16, 2, 2, None)]


def compile_one(job: tuple[bench.Shape, Tuning]) -> None:
    """Fill Triton's cache on disk, in a process of its own."""
    shape, tuning = job
    small = shape._replace(batch=1, context=1024)
    inputs = bench.Inputs.random(small, PRESET)
    try:
        inputs.attend(launch=plan(tuning, small.heads, inputs.tiles.count, inputs.dense_keys.shape[2], 1))
        torch.cuda.synchronize()
    except Exception as error:  # the main process reports it
        print(f"cannot run {tuning}: {type(error).__name__}", flush=True)


def tune(shape: bench.Shape, deadline: float) -> None:
    first = bench.Inputs.random(shape, PRESET)
    sets = [first]
    sets += [bench.Inputs.random(shape, PRESET, seed) for seed in range(1, -(-bench._COLD_BYTES // first.packed_bytes))]
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    units = shape.batch * shape.heads * -(-shape.groups // 8)
    results, best_of_kind = [], {}
    for option in options():
        seen = set()
        for programs in PROGRAMS:
            if time.monotonic() > deadline:
                break
            tuning = option._replace(programs=programs)
            launch = plan(tuning, units, first.tiles.count, first.dense_keys.shape[2], multiprocessors)
            if launch in seen:
                continue
            seen.add(launch)
            try:
                bench.error_of(first, launch=launch) if len(seen) == 1 else None
                elapsed = bench.milliseconds([lambda s=s, n=launch: s.attend(launch=n) for s in sets], replays=7)
            except Exception as error:
                print(f"  {tuning}: {type(error).__name__} {error}"[:200], flush=True)
                break
            results.append((elapsed * 1e3, tuning, launch))
            best_of_kind[option] = min(best_of_kind.get(option, 1e9), elapsed)
            # A kind that is far behind with its second split will not catch up.
            if len(seen) >= 3 and best_of_kind[option] > 1.3 * min(best_of_kind.values()):
                break
    floor = first.packed_bytes / 1e6
    print(f"{shape}  {floor:.1f} MB")
    for elapsed, tuning, launch in sorted(results, key=lambda r: r[0])[:8]:
        cut = f"splits {launch.splits} dense {launch.dense_splits}"
        print(f"  {elapsed:7.1f} us  {floor / elapsed:.2f} TB/s  {tuning}  {cut}")
    if results:
        major, columns = torch.cuda.get_device_capability()[0], 4 if shape.groups <= 4 else 8
        best = min(results, key=lambda r: r[0])[1]
        print(f"    (({major}, {columns}, {shape.head_dim}), {best}),", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0, help="stop measuring after this long")
    every = [",".join(map(str, shape)) for shape in bench.SHAPES]
    parser.add_argument("--shapes", nargs="*", default=every, help="as in the bench")
    parser.add_argument("--workers", type=int, default=8, help="processes that compile")
    arguments = parser.parse_args()
    start = time.monotonic()
    shapes = [bench.Shape(*map(int, text.split(","))) for text in arguments.shapes]
    kinds = {(4 if s.groups <= 4 else 8, s.groups, s.head_dim): s for s in shapes}
    jobs = [(shape, option) for shape in kinds.values() for option in options()]
    with multiprocessing.get_context("spawn").Pool(arguments.workers) as pool:
        pool.map(compile_one, jobs, chunksize=1)
    print(f"{len(jobs)} kernels compiled in {time.monotonic() - start:.0f} s", flush=True)
    for i, shape in enumerate(shapes):
        left = start + arguments.seconds - time.monotonic()
        tune(shape, time.monotonic() + max(0.0, left) / (len(shapes) - i))


if __name__ == "__main__":
    main()
