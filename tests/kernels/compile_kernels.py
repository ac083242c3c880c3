"""Compiles kernels for many settings on a machine without a GPU.

    python -m tests.kernels.compile_kernels pack advance

The host functions run as they are, so what is compiled is what they would launch: only their tensors hold no data, and
Triton's driver launches nothing. To be run in a process of its own, as Triton decides when a kernel is defined whether
it is interpreted.

To see whether a change of the sources changes any kernel, dump what all compile to in both checkouts, and compare::

    PYTHONPATH=kernels python -m tests.kernels.compile_kernels --dump /tmp/before
    PYTHONPATH=kernels python -m tests.kernels.compile_kernels --dump /tmp/after
    diff -rq /tmp/before /tmp/after

Every setting gives the kernels' PTX and Triton's IR, without names, labels and source positions. The IR may differ in
the order of constants where the PTX does not. It takes ten minutes of one core.
"""

from __future__ import annotations

import argparse
import itertools
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from kvarn_kernels import dequantize_tiles, quantize_tiles
from kvarn_kernels.append import LayerShape, advance, pack, write
from kvarn_kernels.bundles import Held, Packed, Run, Scheme, Step
from kvarn_kernels.decode_attention import decode_attention
from kvarn_kernels.imbalance import imbalance_trace
from tests.kernels.machine import GPUS, Machine, innermost

Variant = dict[str, Any]


def pairwise(factors: dict[str, Sequence[Any]]) -> list[Variant]:
    """Settings in which every two values of two factors meet at least once."""

    def pairs(chosen: dict[str, int]) -> set[tuple[tuple[str, int], ...]]:
        return set(itertools.combinations(sorted(chosen.items()), 2))

    missing: set[tuple[tuple[str, int], ...]] = set()
    for a, b in itertools.combinations(factors, 2):
        for i, j in itertools.product(range(len(factors[a])), range(len(factors[b]))):
            missing |= pairs({a: i, b: j})
    variants = []
    while missing:
        chosen = dict(min(missing))
        others = [name for name in factors if name not in chosen]
        for name in sorted(others, key=lambda name: -len(factors[name])):
            gains = [len(pairs({**chosen, name: i}) & missing) for i in range(len(factors[name]))]
            chosen[name] = gains.index(max(gains))
        missing -= pairs(chosen)
        variants.append({name: values[chosen[name]] for name, values in factors.items()})
    return variants


def empty(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=torch.device("cuda", torch.cuda.current_device()))


def tokens(v: Variant, length: int, dim: int) -> torch.Tensor:
    """``[2, heads, length, dim]``, contiguous or with its dimensions stored in reverse."""
    if v["reversed"]:
        return empty(dim, length, v["heads"], 2, dtype=v["dtype"]).permute(3, 2, 1, 0)
    return empty(2, v["heads"], length, dim, dtype=v["dtype"])


def arenas(v: Variant) -> tuple[Packed, Packed]:
    """Of keys and of values."""
    lead, size, (key_dim, value_dim) = (2, v["heads"], v["capacity"]), v["tile_size"], v["dims"]

    def arena(codes: tuple[int, int], channels: int, zero_points: int) -> Packed:
        return Packed(
            empty(*lead, *codes, dtype=torch.uint8), *(empty(*lead, n) for n in (channels, size, zero_points))
        )

    keys = arena((size * v["key_bits"] // 8, key_dim), key_dim, key_dim)
    return keys, arena((value_dim * v["value_bits"] // 8, size), value_dim, size)


# Every head_dim is one of keys and one of values. Numbers that are 1 are constants to Triton, so each is 1 at times.
TILES: dict[str, Sequence[Any]] = {
    "arch": (80, 90),
    "tile_size": (128, 64),
    "key_bits": (4, 2, 3, 8),
    "value_bits": (2, 3, 4, 8),
    "dims": ((128, 128), (64, 80), (96, 192), (256, 512), (512, 256)),
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "heads": (2, 1),
    "capacity": (4, 1),
}
METHODS = ("kvarn", "published", "hadamard", "rtn")


def scheme(v: Variant) -> Scheme:
    method = v.get("method", "kvarn" if v.get("rotated") else "rtn")
    return Scheme(v["key_bits"], v["value_bits"], method, v.get("iterations", 8))


def quantize(v: Variant) -> None:
    quantize_tiles(
        *(tokens(v, v["capacity"] * v["tile_size"], dim) for dim in v["dims"]),
        empty(2, v["heads"], v["dims"][0]) if v["method"] == "kvarn" else None,
        empty(2, dtype=torch.int64) if v["padded"] else None,
        *arenas(v),
        scheme(v),
        slot=0,
        position=0,
    )


def trace_imbalance(v: Variant) -> None:
    size, dim = v["sides"]
    tiles = empty(v["tiles"], size, dim, dtype=torch.float32)
    imbalance_trace(tiles.mT if v["transposed"] else tiles, v["rounds"], v["relative"])


def held(v: Variant, dense_keys: torch.Tensor, dense_values: torch.Tensor, count: int) -> Held:
    run = [empty(2, v["heads"], 1, dim, dtype=v["dtype"]) for dim in v["dims"]]
    return Held(
        *arenas(v),
        empty(2, v["heads"], v["dims"][0]) if v["prescale"] else None,
        empty(2, dtype=torch.int64) if v["rows"] else None,
        dense_keys,
        dense_values,
        Run(empty(2, dtype=torch.int64), *run) if v["padded"] else None,
        count,
        16,
        scheme(v),
    )


def dequantize(v: Variant) -> None:
    dequantize_tiles(held(v, *(tokens(v, 50, dim) for dim in v["dims"]), 1))


def layer_shape(v: Variant) -> LayerShape:
    dense = v["capacity"] if "reversed" in v else 80 + v["tile_size"]
    heads, dims, dtype = v.get("heads", 1), v.get("dims", (128, 128)), v.get("dtype", torch.float16)
    capacity, padded = v.get("capacity", 1), v.get("padded", False)
    return LayerShape(2, heads, *dims, dtype, 4096, capacity, dense, 16, 64, v["tile_size"], padded)


def pack_tiles(v: Variant) -> None:
    counters, table = (empty(v["layers"], n, dtype=torch.int64) for n in (4, 12))
    pack(counters, table, layer_shape(v), scheme(v))


def write_token(v: Variant) -> None:
    dense = [empty(2, v["heads"], v["capacity"], dim, dtype=v["dtype"]) for dim in v["dims"]]
    write(*(tokens(v, 1, dim) for dim in v["dims"]), empty(4, dtype=torch.int64), *dense, layer_shape(v))


def advance_layers(v: Variant) -> None:
    advance(empty(v["layers"], 4, dtype=torch.int64), layer_shape(v))


def attend(v: Variant) -> None:
    lead, key_dim, queries, dense = (2, v["heads"]), v["dims"][0], v["queries"], 16 + v["tail"]
    query_heads = v["heads"] * v["group"]
    mask = None
    if v["mask"] is not None:
        dtype, shared = v["mask"]
        columns = (1, 1) if shared else (query_heads, queries)
        mask = empty(2, *columns, dense + v["capacity"] * v["tile_size"], dtype=dtype)
    token = [empty(*lead, 1, dim, dtype=v["dtype"]) for dim in v["dims"]] if v["step"] == "token" else ()
    decode_attention(
        empty(2, queries, query_heads, key_dim, dtype=v["dtype"]).transpose(1, 2),
        held(v, *(empty(*lead, dense, dim, dtype=v["dtype"]) for dim in v["dims"]), v["capacity"]),
        mask,
        scaling=key_dim**-0.5,
        causal=v["causal"],
        sliding_window=v["window"],
        softcap=v["softcap"],
        sinks=None if v["sinks"] is None else empty(query_heads, dtype=v["sinks"]),
        step=Step(empty(4, dtype=torch.int64), *token) if v["step"] else None,
        slices=v["slices"],
    )


LEAST_SHARED_MEMORY = {"arch": 86, "dims": (256, 256)}
# Host function, factors, and what is compiled further than to Triton's IR: up to which stage, and how it differs from
# the first value of every factor. The tile kernels end at the stage that lays out shared memory, as the rest takes
# seconds.
CASES: dict[str, tuple[Callable[[Variant], None], dict[str, Sequence[Any]], list[tuple[str, Variant]]]] = {
    "quantize": (
        quantize,
        {**TILES, "method": METHODS, "iterations": (8, 0), "padded": (False, True), "reversed": (False, True)},
        [("llir", LEAST_SHARED_MEMORY)],
    ),
    "imbalance": (
        trace_imbalance,
        {
            "arch": (80, 90),
            "sides": ((128, 128), (64, 80), (64, 8), (128, 256), (128, 512)),
            "tiles": (4, 1),
            "rounds": (11, 0),
            "relative": (True, False),
            "transposed": (False, True),
        },
        [("cubin", {"arch": 86})],
    ),
    "pack": (
        pack_tiles,
        {
            **TILES,
            "dims": ((128, 128), (64, 80), (256, 512)),  # what depends on them is the code of quantize
            "method": METHODS,
            "iterations": (8, 0),
            "layers": (28, 1),
            "padded": (False, True),
        },
        [("llir", LEAST_SHARED_MEMORY)],
    ),
    "write": (
        write_token,
        {
            "arch": (80, 90),
            "tile_size": (128, 64),
            "dims": ((128, 128), (64, 80), (256, 512)),
            "dtype": (torch.bfloat16, torch.float16, torch.float32),
            "heads": (2, 1),
            "capacity": (4, 1),
            "reversed": (False, True),
        },
        [("cubin", {"arch": 86})],
    ),
    "advance": (
        advance_layers,
        {"arch": (80, 90), "layers": (28, 1), "tile_size": (128, 64)},
        [("cubin", {"arch": 86})],
    ),
    "dequantize": (
        dequantize,
        {
            **TILES,
            "rotated": (True, False),
            "prescale": (True, False),
            "rows": (False, True),
            "padded": (False, True),
            "reversed": (False, True),
        },
        [("cubin", {"arch": 86})],
    ),
    "attention": (
        attend,
        {
            **TILES,
            "dims": ((128, 128), (64, 80), (80, 96), (192, 256), (256, 64)),
            "dtype": (torch.bfloat16, torch.float16),
            "queries": (1, 2, 16),
            "group": (4, 1),
            "tail": (64, 0),
            "rotated": (True, False),
            "prescale": (True, False),
            "rows": (False, True),
            "padded": (False, True),
            # The dtype, and whether it is the same for all heads and queries.
            "mask": (None, (torch.bool, True), (torch.bool, False), (torch.bfloat16, True), (torch.float32, False)),
            "step": (False, True, "token"),
            "causal": (True, False),
            "window": (None, 100),
            "softcap": (None, 30.0),
            "sinks": (None, torch.bfloat16, torch.float32),
            "slices": (0, 1, 7, 40),
        },
        [("cubin", {"arch": 86})],
    ),
}


def main(names: Sequence[str], folder: Path | None = None) -> None:
    """Compile and print, as JSON lines, each setting and then the kernels compiled for it and the error, if any.

    With a ``folder``, what is compiled is dumped there.
    """
    warnings.filterwarnings("ignore")
    machine = Machine()
    machine.install()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        machine.folder = folder
    for name in names:
        call, factors, further = CASES[name]
        usual = {factor: values[0] for factor, values in factors.items()}
        # These first: what has been compiled is not compiled again.
        every = [(stage, {**usual, **changed}) for stage, changed in further]
        every += [("ttir", variant) for variant in pairwise(factors)]
        if folder is not None:
            every = [("ptx", variant) for variant in [usual, *(variant for _, variant in every)]]
        for index, (machine.last_stage, variant) in enumerate(every):
            machine.setting = f"{name}-{index:03}"
            machine.current = list(GPUS).index(variant["arch"])
            machine.compiled.clear()
            setting = " ".join(f"{key}={value}" for key, value in variant.items())
            print(json.dumps(f"{name} to {machine.last_stage}: {setting}"), flush=True)
            error = None
            try:
                with FakeTensorMode():
                    call(variant)
            except Exception as e:
                error = innermost(e)
            print(json.dumps({"kernels": machine.compiled, "error": error}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(CASES)}; all if none is given")
    parser.add_argument("--dump", type=Path, metavar="FOLDER", help="for Triton's IR and PTX")
    arguments = parser.parse_args()
    main(arguments.names or list(CASES), arguments.dump)
