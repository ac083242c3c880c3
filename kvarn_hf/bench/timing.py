"""The timer of every bench: medians over replays of a CUDA graph, over more inputs than the GPU's cache holds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

# More than three times the L2 cache of the largest GPUs of today.
_COLD_BYTES = 200_000_000
_CALLS_TIMED = 20  # at least, in one graph, whose own launch then counts for little
_WARM_UP_MS = 20.0  # an idle GPU needs milliseconds to reach its clock

_Input = TypeVar("_Input")


def cold_inputs(make: Callable[[int], _Input], size: int) -> list[_Input]:
    """As many inputs ``make(seed)`` of ``size`` bytes as it takes to find none of them in a cache."""
    return [make(seed) for seed in range(max(1, -(-_COLD_BYTES // size)))]


def milliseconds(calls: Sequence[Callable[[], object]], replays: int = 51) -> float:
    """Median time of one call, in milliseconds: what the GPU takes, however slowly Python launches it.

    ``calls`` do the same work over different inputs (see :func:`cold_inputs`); a graph of all of them is replayed.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    repeats = -(-_CALLS_TIMED // len(calls))
    with torch.cuda.graph(graph):
        for call in [*calls] * repeats:
            call()
    times: list[float] = []
    while len(times) < 2 or sum(times) < _WARM_UP_MS:
        times.append(_elapsed(graph.replay))
    times = [_elapsed(graph.replay) for _ in range(replays)]
    return statistics.median(times) / (len(calls) * repeats)


def copy_bandwidth() -> float:
    """Bytes read plus bytes written per second by a copy of 1 GiB on the device."""
    source = torch.empty(1 << 28, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    times = [_elapsed(lambda: target.copy_(source)) for _ in range(12)]  # a graph would not time the same copy
    return 2 * source.nbytes / (statistics.median(times[2:]) / 1e3)


def _elapsed(call: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
