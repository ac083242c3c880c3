"""Decode speed of ``generate()`` on a model's shape with random weights, for several caches in one run."""

from __future__ import annotations

import copy
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.cache_utils import StaticCache

from kvarn_hf import ops
from kvarn_hf.bench.results import measured_with, save
from kvarn_hf.cache import KVarNCache
from kvarn_hf.evaluation.blocks import cache_argument
from kvarn_hf.evaluation.caches import cache_spec
from kvarn_hf.terminal import steps, table

_FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size"),
)
SHAPES = {
    "llama-3.1-8b": dict(zip(_FIELDS, (4096, 14336, 32, 32, 8, 128, 128256), strict=True)),
    "tiny": dict(zip(_FIELDS, (256, 512, 2, 4, 2, 64, 512), strict=True)),
}
LONGEST = 0  # as a context: what fits
_WARM_UP_TOKENS = 8
_FILLED_AT_ONCE = 1 << 18  # tokens, of all rows: a prompt in pieces, as what fits leaves no room for more
_RESERVED = 0.06  # of the GPU's memory, for a step's own tensors and what the allocator cannot use


def _fill(cache: Any, model: Any, batch: int, context: int) -> None:
    """Random keys and values in every layer."""
    for layer in range(model.config.num_hidden_layers):
        cache.update(*_random_states(model, batch, context), layer)


def fill_kvarn(cache: Any, model: Any, batch: int, context: int) -> None:
    """Random keys and values in every layer of a :class:`KVarNCache`."""
    # In pieces, and without reading them back: what fits leaves no room for a dense layer.
    piece = _FILLED_AT_ONCE // batch
    for layer in cache.layers:
        layer.update(*_random_states(model, batch, min(piece, context)))
        for start in range(piece, context, piece):
            states = _random_states(model, batch, min(piece, context - start))
            layer.replace(ops.commit(layer.snapshot().appended(*states)))


def _fill_one_layer(cache: Any, model: Any, batch: int, context: int) -> None:
    # The others hold the same: quantizing takes seconds per layer here, and time does not depend on what is held.
    cache.update(*_random_states(model, batch, context), 0)
    count = model.config.num_hidden_layers
    cache.layers[1:count] = [copy.deepcopy(cache.layers[0]) for _ in range(1, count)]


def _fill_turboquant(cache: Any, model: Any, batch: int, context: int) -> None:
    # As its patched attention does in a prefill: the compressed tokens beside, one channel of them in the cache itself.
    for layer in range(model.config.num_hidden_layers):
        keys, values = _random_states(model, batch, context)
        cache.store_compressed_key(keys, layer)
        cache.store_compressed_value(values, layer)
        cache.update(keys[..., :1].clone(), values[..., :1].clone(), layer)


def _random_states(model: Any, batch: int, context: int) -> list[torch.Tensor]:
    shape = (batch, model.config.num_key_value_heads, context, model.config.head_dim)
    return [torch.randn(shape, dtype=model.dtype, device=model.device) for _ in range(2)]


def _fixed_size(model: Any, length: int) -> KVarNCache:
    return KVarNCache(model.config, max_cache_len=length)


@dataclass(frozen=True)
class Contestant:
    """A cache to time: how to make it for a context, fill it, and clean up, and the attention it runs with."""

    make: Callable[[Any, int], Any]
    attention: str = "sdpa"
    fill: Callable[[Any, Any, int, int], None] = _fill
    release: Callable[[Any], None] = lambda model: None

    @classmethod
    def named(cls, name: str, **options: Any) -> Contestant:
        """A cache of :mod:`kvarn_hf.evaluation.caches`."""
        spec = cache_spec(name)
        return cls(lambda model, length: spec.make(model), release=spec.release, **options)


CONTESTANTS = {
    "dynamic": Contestant.named("dense"),
    "static": Contestant(lambda model, length: StaticCache(config=model.config, max_cache_len=length)),
    "quanto-int4": Contestant.named("quanto-int4"),
    "hqq-int4": Contestant.named("hqq-int4", fill=_fill_one_layer),
    "fused-turboquant-4bit": Contestant.named("fused-turboquant-4bit", fill=_fill_turboquant),
    "kvarn": Contestant.named("kvarn_k4v2_g128", fill=fill_kvarn),
    "kvarn-attention": Contestant(lambda model, length: KVarNCache(model.config), "kvarn", fill_kvarn),
    "kvarn-dequantized": Contestant(lambda model, length: KVarNCache(model.config, fused=False), fill=fill_kvarn),
    "kvarn-k2v2": Contestant.named("kvarn_k2v2_g128", fill=fill_kvarn),
    "kvarn-compiled": Contestant(_fixed_size, fill=fill_kvarn),
    "kvarn-attention-compiled": Contestant(_fixed_size, "kvarn", fill_kvarn),
}
DEFAULT_CACHES = tuple(name for name in CONTESTANTS if name not in ("kvarn-dequantized", "kvarn-k2v2"))


@dataclass(frozen=True)
class Timing:
    """What was measured of one cache; None where it failed, and ``failure`` says why.

    ``context`` tokens are in each row before the first step; ``step_ms`` is the median decode step in milliseconds,
    ``tokens_per_second`` counts the new tokens of all rows, ``warm_up_s`` are the seconds that compiling and capturing
    took before, and ``cache_gib`` and ``peak_gib`` are memory beyond the weights, after filling the cache and at the
    peak.
    """

    cache: str
    batch: int
    context: int
    step_ms: float | None
    tokens_per_second: float | None
    warm_up_s: float | None
    cache_gib: float | None
    peak_gib: float | None
    failure: str | None = None


def generate(
    shape: str = "llama-3.1-8b",
    contexts: Sequence[int] = (2048, 8192, 32768),
    batches: Sequence[int] = (1, 8),
    caches: Sequence[str] = DEFAULT_CACHES,
    new_tokens: int = 64,
    device: str = "cuda",
    out: str | Path | None = None,
) -> list[dict[str, Any]]:
    """Time decode steps of ``generate()`` with every cache, at every batch and context, and print and save what comes.

    The cache is filled with random keys and values instead of a prefill, so that a run takes minutes. ``generate()``
    then runs twice: for a few tokens, in which caches that compile do so, and for ``new_tokens``, which count. The
    compiler's own start, for which every contestant that compiles would wait, comes before all of them. Returns the
    fields of a :class:`Timing` for every run.

    Parameters
    ----------
    shape : str
        A key of :data:`SHAPES`.
    contexts, batches : sequence of int
        Tokens in the cache, and rows. :data:`LONGEST` (0) as a context is the longest that each cache has room for,
        in steps of 1,024.
    caches : sequence of str
        Keys of :data:`CONTESTANTS`.
    new_tokens : int
        Steps to time.
    out : str or Path, optional
        Folder for ``bench_generate.json`` and ``.md``.
    """
    unknown = [name for name in caches if name not in CONTESTANTS]
    if unknown:
        raise ValueError(f"caches must be of {', '.join(CONTESTANTS)}, got {unknown[0]!r}")
    console = Console()
    model = random_model(shape, device)
    _start_compiler(device)
    rows: list[Timing] = []
    runs = list(itertools.product(batches, contexts, caches))
    with steps(console, "decoding", len(runs)) as bar, torch.inference_mode():
        for batch, context, name in runs:
            bar.begin(f"{name} batch {batch} context {context or 'that fits'}")
            rows.append(_time(model, name, batch, context, new_tokens))
            bar.found(_summary(rows[-1]))
            if out is not None:
                save([asdict(row) for row in rows], "generate", out)
            bar.end()
    console.print(_table(rows, shape))
    return [asdict(row) for row in rows]


def random_model(shape: str, device: str) -> Any:
    """A model with random weights in bfloat16, of a shape in :data:`SHAPES`, that never ends its answer."""
    if shape not in SHAPES:
        raise ValueError(f"shape must be of {', '.join(SHAPES)}, got {shape!r}")
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=1 << 20, dtype=torch.bfloat16)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def _start_compiler(device: str) -> None:
    """Imports, and the processes that compile: the first to compile anything waits for them."""
    compiled = torch.compile(lambda x: torch.nn.functional.gelu(x) + x.sum(), mode="reduce-overhead")
    compiled(torch.ones(64, 64, device=device))
    torch._dynamo.reset()


def _longest(model: Any, contestant: Contestant, batch: int, steps: int) -> int:
    """Tokens per row that a cache has room for, by what it holds per token."""
    short, long = 8192, 16384

    def held(length: int) -> int:
        before, cache = _allocated(), contestant.make(model, length)
        contestant.fill(cache, model, batch, length)
        return torch.cuda.memory_allocated() - before

    least = held(short)
    per_token = (held(long) - least) / (long - short)
    room = torch.cuda.get_device_properties(model.device).total_memory * (1 - _RESERVED) - _allocated()
    return int((room - least) / per_token + short - steps) // 1024 * 1024


def _allocated() -> int:
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def _time(model: Any, name: str, batch: int, context: int, new_tokens: int) -> Timing:
    contestant = CONTESTANTS[name]
    model.set_attn_implementation(contestant.attention)
    room = _WARM_UP_TOKENS + new_tokens + 2
    base = _allocated()
    try:
        context = context or _longest(model, contestant, batch, room)
        cache = contestant.make(model, context + room)
        contestant.fill(cache, model, batch, context)
        held = torch.cuda.memory_allocated() - base
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start = time.perf_counter()
        decode(model, cache, batch, _WARM_UP_TOKENS)
        taken = time.perf_counter() - start
        step, gib = statistics.median(decode(model, cache, batch, new_tokens)), 2.0**-30
        peak = torch.cuda.max_memory_allocated() - base
        warm_up = max(0.0, taken - _WARM_UP_TOKENS * step)
        return Timing(name, batch, context, 1e3 * step, batch / step, warm_up, held * gib, peak * gib)
    except Exception as error:  # a competitor that fails is a row of the table, not the end of the run
        return Timing(name, batch, context, *(None,) * 5, failure=f"{type(error).__name__}: {error}"[:200])
    finally:
        contestant.release(model)
        # Every contestant compiles for itself, and none is left over from the one before.
        vars(model).pop("_compiled_call", None)
        torch._dynamo.reset()


def decode(model: Any, cache: Any, batch: int, tokens: int) -> list[float]:
    """Seconds of ``generate()``'s steps, but for the first, as it makes ``tokens`` tokens behind what a cache holds."""
    ids = torch.randint(1, model.config.vocab_size, (batch, int(cache.get_seq_length()) + 1), device=model.device)
    times: list[float] = []

    def never(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """A stopping criterion that never stops, and notes when it was asked."""
        torch.cuda.synchronize()
        times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    cached = {cache_argument(model): cache, "attention_mask": torch.ones_like(ids)}
    model.generate(ids, max_new_tokens=tokens, do_sample=False, stopping_criteria=[never], **cached)
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def describe(shape: str) -> str:
    """What the steps are of, as a title."""
    made = measured_with()
    return f"generate(), {shape} shape, bfloat16, {made['gpu']}, torch {made['torch']}"


def _summary(row: Timing) -> str:
    if row.failure is not None:
        return row.failure
    return (
        f"{row.context:,} tokens, {row.step_ms:.2f} ms a step, {row.warm_up_s:.1f} s warm-up, "
        f"{row.cache_gib:.2f} GiB held, {row.peak_gib:.2f} GiB peak"
    )


def _cell(figure: float | None, decimals: int = 2) -> str:
    return "-" if figure is None else f"{figure:.{decimals}f}"


def _table(rows: Sequence[Timing], shape: str) -> Table:
    figures = "ms a step", "tokens /s", "vs dense", "warm up s", "GiB held", "GiB peak"
    made = table("rows", "tokens", "cache", *figures, title=describe(shape), names=("cache",))
    dense = {(r.batch, r.context): r.step_ms for r in rows if r.cache == "dynamic"}
    for r in rows:
        base = dense.get((r.batch, r.context))
        ratio = f"{base / r.step_ms:.2f}x" if base and r.step_ms else "-"
        speed = _cell(r.step_ms), _cell(r.tokens_per_second, 1), ratio, _cell(r.warm_up_s)
        made.add_row(str(r.batch), str(r.context), r.cache, *speed, _cell(r.cache_gib), _cell(r.peak_gib))
    return made
