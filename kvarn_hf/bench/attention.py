"""What reading a packed cache costs at decode, against dense attention: ``kvarn bench attention``.

Every figure is the whole thing: sinks, tiles, tail and combination. Times are medians over replays of a CUDA graph that
holds one call per input set, with so many sets that they exceed the L2 cache several times over.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvarn_hf import ops
from kvarn_hf.bench.inputs import in_float, packed_state, random_tokens, relative_error, stored_bytes
from kvarn_hf.bench.results import save
from kvarn_hf.bench.timing import cold_inputs, copy_bandwidth, milliseconds
from kvarn_hf.config import KVarNConfig
from kvarn_hf.method.attention import attention as reference_attention
from kvarn_hf.state.layer_state import LayerState


class Shape(NamedTuple):
    """One row of the table: KV ``heads``, each shared by ``groups`` query heads."""

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


@dataclass(frozen=True)
class Inputs:
    """A packed layer of random tokens, and a query ``[batch, query_heads, 1, head_dim]``."""

    state: LayerState
    query: torch.Tensor

    @classmethod
    def random(cls, shape: Shape, preset: str, seed: int = 0) -> Inputs:
        """Inputs of a shape, on the GPU, bfloat16."""
        batch, context, heads, groups, dim = shape
        keys, values = random_tokens(batch, heads, context, dim, seed)
        _, query = random_tokens(batch, heads * groups, 1, dim, seed + 1000)
        return cls(packed_state(keys, values, KVarNConfig.from_preset(preset)), query)

    @classmethod
    def cold(cls, shape: Shape, preset: str, first: Inputs) -> list[Inputs]:
        """``first`` and as many more as it takes to find none of them in a cache."""
        return cold_inputs(lambda seed: cls.random(shape, preset, seed) if seed else first, stored_bytes(first.state))

    def attend(self, tuning: Any = None) -> torch.Tensor:
        """The fused attention; ``tuning`` as in :func:`kvarn_hf.ops.attend`."""
        out = ops.attend(self.state, self.query, None, tuning=tuning)
        assert out is not None  # every shape and preset here is one that the kernel takes
        return out

    def dequantize_and_attend(self) -> torch.Tensor:
        """The whole layer dequantized, then SDPA."""
        keys, values = ops.dense(self.state)
        return scaled_dot_product_attention(self.query, keys, values, enable_gqa=self.query.shape[1] > keys.shape[1])


def error_of(inputs: Inputs, tuning: Any = None) -> tuple[float, float]:
    """Relative error of the fused attention and of bfloat16 SDPA, both against float64, in the first row.

    Raises
    ------
    RuntimeError
        If the fused attention errs more than twice as much as SDPA, or differs from run to run.
    """
    keys, values = in_float(inputs.state)
    query = inputs.query[:1]
    scaling = query.shape[3] ** -0.5
    want = reference_attention(query, keys, values, scaling=scaling)
    got = inputs.attend(tuning)
    if not torch.equal(got, inputs.attend(tuning)):
        raise RuntimeError("the fused attention gave other bits at the second run")
    groups = query.shape[1] // keys.shape[1]
    low_keys, low_values = (x.bfloat16().repeat_interleave(groups, 1) for x in (keys, values))
    rounded = scaled_dot_product_attention(query, low_keys, low_values, scale=scaling).transpose(1, 2)
    error, bound = relative_error(got[:1], want), relative_error(rounded, want)
    if not error <= 2 * bound:
        raise RuntimeError(f"the fused attention errs by {error:.1e}, bfloat16 SDPA by {bound:.1e}")
    return error, bound


def dense_milliseconds(shape: Shape) -> dict[str, float]:
    """Milliseconds of every SDPA backend that takes the shape, on contiguous bfloat16 keys and values."""
    batch, context, heads, groups, dim = shape
    sets = cold_inputs(lambda seed: random_tokens(batch, heads, context, dim, seed), 4 * batch * heads * context * dim)
    query = torch.randn(batch, heads * groups, 1, dim, device="cuda", dtype=torch.bfloat16)
    grouped = query.view(batch, heads, groups, dim)
    backends = {name: [getattr(SDPBackend, f"{name.upper()}_ATTENTION")] for name in ("flash", "cudnn", "efficient")}
    # One query token sees everything, so the query heads of a KV head may also go in as its query tokens.
    forms = [("", partial(scaled_dot_product_attention, query, enable_gqa=groups > 1))]
    forms += [(" grouped", partial(scaled_dot_product_attention, grouped))] if groups > 1 else []
    times = {}
    for name, backend in (backends | {"default": []}).items():
        for form, attend in forms:
            calls = [partial(attend, k, v) for k, v in sets]
            with contextlib.suppress(RuntimeError), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a page of reasons from every backend that does not take the shape
                with sdpa_kernel(backend) if backend else contextlib.nullcontext():
                    times[name + form] = milliseconds(calls)
    return times


def attention(
    shapes: Iterable[Shape] = SHAPES, presets: Iterable[str] = PRESETS, out: str | Path | None = None
) -> list[dict[str, Any]]:
    """Measure and print, row by row: packed, the best dense SDPA backend, dequantizing and SDPA, and the copy floor.

    Returns one dictionary per shape and preset, with times in microseconds; ``out`` is a folder for
    ``bench_attention.json`` and ``.md``.

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
            packed = milliseconds([inputs.attend for inputs in Inputs.cold(shape, preset, first)])
            dense = dense or dense_milliseconds(shape)
            best = min(dense, key=dense.__getitem__)
            slow = milliseconds([first.dequantize_and_attend], replays=5)
            floor = stored_bytes(first.state) / bandwidth * 1e3
            times: dict[str, Any] = {"packed": packed * 1e3, "of_copy": floor / packed, "floor": floor * 1e3}
            times |= {"dense": {name: t * 1e3 for name, t in dense.items()}, "best_dense": best}
            times |= {"ratio": dense[best] / packed, "dequantize": slow * 1e3, "error": error, "sdpa_error": bound}
            results.append(shape._asdict() | {"preset": preset} | times)
            row = (
                "| {packed:.1f} | {of_copy:.0%} | {floor:.1f} | {fastest:.1f} ({best_dense}) | {ratio:.2f} "
                "| {dequantize:.0f} | {error:.1e} ({sdpa_error:.1e}) |"
            ).format(**times, fastest=dense[best] * 1e3)
            print(f"| {', '.join(map(str, shape))} | {preset} {row}", flush=True)
            if out is not None:
                save(results, "attention", out)
            del first
            torch.cuda.empty_cache()
    return results


if __name__ == "__main__":
    attention()
