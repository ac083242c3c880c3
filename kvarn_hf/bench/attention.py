"""What reading a packed cache costs at decode, against dense attention: ``kvarn bench attention``.

Every figure is the whole thing: sinks, tiles, tail and combination. Times are medians over replays of a CUDA graph that
holds one call per input set, with so many sets that they exceed the L2 cache several times over.
"""

from __future__ import annotations

import contextlib
import statistics
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvarn_hf import ops
from kvarn_hf.bench.results import save
from kvarn_hf.config import KVarNConfig
from kvarn_hf.method import quantize as reference
from kvarn_hf.method.attention import attention as reference_attention
from kvarn_hf.method.quantize import Packed
from kvarn_hf.method.rounding import centre
from kvarn_hf.state.tiles import PackedTiles

if TYPE_CHECKING:
    from kvarn_kernels import Held

# More than three times the L2 cache of the largest GPUs of today.
_COLD_BYTES = 200_000_000
_CALLS_TIMED = 20  # at least, in one graph, whose own launch then counts for little
_WARM_UP_MS = 20.0  # an idle GPU needs milliseconds to reach its clock


class Shape(NamedTuple):
    """One row of the table. ``groups`` query heads share a KV head."""

    batch: int
    context: int
    heads: int
    groups: int
    head_dim: int


SHAPES = (
    Shape(8, 32768, 8, 4, 128),
    Shape(8, 32768, 8, 8, 128),
    Shape(8, 32768, 8, 1, 128),
    Shape(8, 32768, 8, 4, 64),
    Shape(8, 16384, 8, 4, 256),
    Shape(64, 2048, 8, 4, 128),
    Shape(1, 32768, 8, 4, 128),
    Shape(1, 131072, 8, 4, 128),
    Shape(1, 8192, 8, 4, 128),
)
PRESETS = ("kvarn_k4v2_g128", "kvarn_k2v2_g128")


@dataclass
class Inputs:
    """A packed cache of random tiles, a query, and what both take up."""

    config: KVarNConfig
    query: torch.Tensor
    tiles: PackedTiles
    prescale: torch.Tensor
    dense_keys: torch.Tensor
    dense_values: torch.Tensor

    @classmethod
    def random(cls, shape: Shape, preset: str, seed: int = 0, device: str = "cuda") -> Inputs:
        config = KVarNConfig.from_preset(preset)
        generator = torch.Generator(device=device).manual_seed(seed)
        batch, context, heads, groups, dim = shape
        count = config.packed_tiles(context)
        tiles = PackedTiles.allocate(batch, heads, dim, dim, config, count, torch.device(device)).truncated(count)

        def uniform(x: torch.Tensor, low: float, high: float) -> None:
            x.uniform_(low, high, generator=generator)

        for packed, bits in ((tiles.keys, config.key_bits), (tiles.values, config.value_bits)):
            packed.codes.random_(0, 256, generator=generator)
            step = 3.0 / 2**bits
            uniform(packed.channel_scale, 0.5, 1.5)
            uniform(packed.token_scale, 0.5, 1.5)
            grid_scale = packed.channel_scale if packed is tiles.keys else packed.token_scale
            grid_scale.mul_(step)
            uniform(packed.zero_point, centre(bits) * step - 1.8, centre(bits) * step - 1.2)
        length = context - count * config.tile_size
        shape_of_dense = (batch, heads, length, dim)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)

        prescale = torch.empty(batch, heads, dim, dtype=torch.float16, device=device)
        uniform(prescale, 0.5, 1.0)
        query = normal(batch, heads * groups, 1, dim)
        return cls(config, query, tiles, prescale, normal(*shape_of_dense), normal(*shape_of_dense))

    @property
    def packed_bytes(self) -> int:
        """Bytes that one call must read."""
        used = self.tiles.count / self.tiles.capacity
        packed = sum(t.numel() * t.element_size() for t in self.tiles.parts.values()) * used
        return int(packed) + 2 * (self.dense_keys.numel() + self.dense_values.numel())

    def attend(self, **options: Any) -> torch.Tensor:
        """The fused attention; ``options`` of :func:`kvarn_kernels.decode_attention.decode_attention`."""
        from kvarn_kernels.decode_attention import decode_attention

        return decode_attention(self.query, self.held, scaling=self.query.shape[-1] ** -0.5, **options)

    @property
    def held(self) -> Held:
        """The cache as the kernels read it."""
        from kvarn_kernels import Held
        from kvarn_kernels import Packed as PackedArrays

        return Held(
            PackedArrays(*self.tiles.keys),
            PackedArrays(*self.tiles.values),
            self.prescale,
            None,
            self.dense_keys,
            self.dense_values,
            None,
            self.tiles.count,
            self.config.sink_length,
            ops.scheme(self.config),
        )

    def dequantized(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole cache as bfloat16, by the dequantizing kernel."""
        from kvarn_kernels import dequantize_tiles

        return dequantize_tiles(self.held)

    def first_row_in_float(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the first row, ``[1, heads, context, head_dim]``, not rounded to bfloat16."""
        count, sink = self.tiles.count, self.config.sink_length
        keys, values = (Packed(*(t[:1, :, :count] for t in part)) for part in (self.tiles.keys, self.tiles.values))

        def joined(dense: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
            return torch.cat([dense[:1, :, :sink].float(), tiles.flatten(2, 3), dense[:1, :, sink:].float()], 2)

        return (
            joined(self.dense_keys, reference.dequantize_keys(keys, self.prescale[:1].unsqueeze(2), self.config)),
            joined(self.dense_values, reference.dequantize_values(values, self.config)),
        )


def error_of(inputs: Inputs, **options: Any) -> tuple[float, float]:
    """Relative error of the fused attention and of bfloat16 SDPA, both against float64, in the first row.

    Raises
    ------
    RuntimeError
        If the fused attention errs more than twice as much as SDPA, or differs from run to run.
    """
    keys, values = inputs.first_row_in_float()
    query = inputs.query[:1]
    scaling = query.shape[-1] ** -0.5
    want = reference_attention(query, keys, values, scaling=scaling)
    got = inputs.attend(**options)
    if not torch.equal(got, inputs.attend(**options)):
        raise RuntimeError("the fused attention gave other bits at the second run")
    groups = query.shape[1] // keys.shape[1]
    low_keys, low_values = (x.bfloat16().repeat_interleave(groups, 1) for x in (keys, values))
    rounded = scaled_dot_product_attention(query, low_keys, low_values, scale=scaling).transpose(1, 2)
    error, bound = (((x.double() - want).norm() / want.norm()).item() for x in (got[:1], rounded))
    if not error <= 2 * bound:
        raise RuntimeError(f"the fused attention errs by {error:.1e}, bfloat16 SDPA by {bound:.1e}")
    return error, bound


def cold_sets(shape: Shape, preset: str, first: Inputs) -> list[Inputs]:
    """``first`` and as many more inputs as it takes to find none of them in a cache."""
    return [first, *(Inputs.random(shape, preset, seed) for seed in range(1, -(-_COLD_BYTES // first.packed_bytes)))]


def milliseconds(calls: Sequence[Callable[[], object]], replays: int = 51) -> float:
    """Median time of one call, in milliseconds: a graph of all calls, replayed."""
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
        for _ in range(repeats):
            for call in calls:
                call()
    times: list[float] = []
    while len(times) < 2 or sum(times) < _WARM_UP_MS:
        times.append(_elapsed(graph.replay))
    times = [_elapsed(graph.replay) for _ in range(replays)]
    return statistics.median(times) / (len(calls) * repeats)


def _elapsed(call: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def copy_bandwidth() -> float:
    """Bytes read plus bytes written per second by a large copy on the device."""
    source = torch.empty(1 << 28, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    times = [_elapsed(lambda: target.copy_(source)) for _ in range(12)]  # a graph would not time the same copy
    return 2 * source.numel() * source.element_size() / (statistics.median(times[2:]) / 1e3)


def dense_milliseconds(shape: Shape) -> dict[str, float]:
    """Time of every SDPA backend that takes the shape, on contiguous bfloat16 keys and values."""
    batch, context, heads, groups, dim = shape
    size = 4 * batch * heads * context * dim
    sets = [
        [torch.randn(batch, heads, context, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        for _ in range(max(1, -(-_COLD_BYTES // size)))
    ]
    query = torch.randn(batch, heads * groups, 1, dim, device="cuda", dtype=torch.bfloat16)
    grouped = query.view(batch, heads, groups, dim)
    backends = {
        "flash": [SDPBackend.FLASH_ATTENTION],
        "cudnn": [SDPBackend.CUDNN_ATTENTION],
        "efficient": [SDPBackend.EFFICIENT_ATTENTION],
        "default": None,
    }
    times = {}
    for name, backend in backends.items():
        for form in ("", " grouped")[: 1 + (groups > 1)]:
            # One query token sees everything, so the query heads of a KV head may also go in as its query tokens.
            if form:
                calls = [lambda k=k, v=v: scaled_dot_product_attention(grouped, k, v) for k, v in sets]
            else:
                calls = [
                    lambda k=k, v=v: scaled_dot_product_attention(query, k, v, enable_gqa=groups > 1) for k, v in sets
                ]
            with contextlib.suppress(RuntimeError), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a page of reasons from every backend that does not take the shape
                with sdpa_kernel(backend) if backend else contextlib.nullcontext():
                    times[name + form] = milliseconds(calls)
    return times


def attention(
    shapes: Iterable[Shape] = SHAPES, presets: Iterable[str] = PRESETS, out: str | Path | None = None
) -> list[dict[str, Any]]:
    """Measure and print, row by row: packed, the best dense SDPA backend, dequantizing and SDPA, and the copy floor.

    Parameters
    ----------
    shapes : iterable of Shape
        Batch, context, KV heads, query heads per KV head, head_dim.
    presets : iterable of str
    out : str or Path, optional
        Folder for ``bench_attention.json`` and ``.md``.

    Returns
    -------
    list of dict
        One per shape and preset; times in microseconds.

    Raises
    ------
    RuntimeError
        If a result is wrong, before anything is timed.
    """
    bandwidth = copy_bandwidth()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16; "
        f"copy bandwidth {bandwidth / 1e12:.2f} TB/s\n"
        "times in microseconds, medians of CUDA graph replays over cold inputs; 'of copy' is packed bytes per second "
        "over copy bandwidth\n\n"
        "| batch, context, KV heads, query/KV, head_dim | preset | packed | of copy | floor | best dense "
        "| times faster | dequantize + SDPA | error (SDPA's) |\n|---|---|---|---|---|---|---|---|---|",
        flush=True,
    )
    results = []
    for shape in map(Shape._make, shapes):
        dense: dict[str, float] = {}
        for preset in presets:
            first = Inputs.random(shape, preset)
            error, bound = error_of(first)
            torch.cuda.empty_cache()
            sets = cold_sets(shape, preset, first)
            packed = milliseconds([s.attend for s in sets])
            del sets
            dense = dense or dense_milliseconds(shape)
            best = min(dense, key=dense.__getitem__)
            groups = shape.groups

            def dequantize_and_attend(inputs: Inputs = first, groups: int = groups) -> torch.Tensor:
                keys, values = inputs.dequantized()
                return scaled_dot_product_attention(inputs.query, keys, values, enable_gqa=groups > 1)

            slow = milliseconds([dequantize_and_attend], replays=5)
            floor = first.packed_bytes / bandwidth * 1e3
            results.append(
                {
                    **shape._asdict(),
                    "preset": preset,
                    "packed": packed * 1e3,
                    "of_copy": floor / packed,
                    "floor": floor * 1e3,
                    "dense": {name: t * 1e3 for name, t in dense.items()},
                    "best_dense": best,
                    "ratio": dense[best] / packed,
                    "dequantize": slow * 1e3,
                    "error": error,
                    "sdpa_error": bound,
                }
            )
            print(
                f"| {', '.join(map(str, shape))} | {preset} | {packed * 1e3:.1f} | {floor / packed:.0%} "
                f"| {floor * 1e3:.1f} | {dense[best] * 1e3:.1f} ({best}) | {dense[best] / packed:.2f} "
                f"| {slow * 1e3:.0f} | {error:.1e} ({bound:.1e}) |",
                flush=True,
            )
            if out is not None:
                save(results, "attention", out)
            del first, dequantize_and_attend
            torch.cuda.empty_cache()
    return results


if __name__ == "__main__":
    attention()
