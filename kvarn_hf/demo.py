"""The demo: one prompt, answered from the dense cache and from KVarN, and what that costs and saves."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from kvarn_hf.cache import KVarNCache
from kvarn_hf.config import KVarNConfig
from kvarn_hf.evaluation.blocks import cache_argument
from kvarn_hf.evaluation.pseudo_decode import BLOCK, pseudo_decode
from kvarn_hf.layers.stock import tensors_in
from kvarn_hf.terminal import OnStep, table

PROMPT_SOURCE = "James Madison, First Annual Message to the Congress, 29 November 1809 (public domain)"
_INSTRUCTION = "Write a detailed summary of the President's message above."


@dataclass(frozen=True)
class Continuation:
    """What one cache gave: ids and text of the new tokens, the bytes it holds at the end, the seconds to the first new
    token (the prefill), and the tokens per second after it."""

    tokens: list[int]
    text: str
    cache_bytes: int
    first_token_seconds: float
    tokens_per_second: float


@dataclass(frozen=True)
class DemoResult:
    """What :func:`run_demo` found. ``first_difference`` is the index of the first new token that differs, None if all
    are equal; ``kl`` the mean KL(dense || kvarn) of the next-token distributions over the prompt's second half, in
    nats; ``top1`` the share of those positions at which both have the same most likely token; ``cache`` what was
    generated with."""

    dense: Continuation
    kvarn: Continuation
    prompt_tokens: int
    first_difference: int | None
    kl: float
    top1: float
    cache: KVarNCache


def default_prompt() -> str:
    """The text that ships with the package, about 2,100 tokens, with an instruction behind it."""
    text = resources.files("kvarn_hf").joinpath("data/madison_1809.txt").read_text(encoding="utf-8")
    return f"{text.strip()}\n\n{_INSTRUCTION}"


def encode(tokenizer: Any, prompt: str) -> torch.Tensor:
    """Token ids ``[1, tokens]`` of a prompt, as a user's turn if the tokenizer has a chat template."""
    if tokenizer.chat_template:
        turn = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        return tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    return tokenizer(prompt, return_tensors="pt").input_ids


def run_demo(
    model: Any,
    tokenizer: Any,
    prompt: str,
    config: KVarNConfig,
    max_new_tokens: int = 64,
    on_step: OnStep = lambda stage, done, total: None,
) -> DemoResult:
    """Continue a prompt greedily from both caches and compare them.

    Parameters
    ----------
    model, tokenizer : transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase
    prompt : str
        At least two tokens.
    max_new_tokens : int
    on_step : OnStep

    Raises
    ------
    ValueError
        If the prompt or ``max_new_tokens`` is too short.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    input_ids = encode(tokenizer, prompt).to(model.device)
    length = input_ids.shape[1]
    if length < 2:
        raise ValueError(f"prompt must have at least 2 tokens, got {length}")

    kvarn = partial(KVarNCache, model.config, config)

    def generated(name: str, make_cache: Callable[[], Any]) -> tuple[Continuation, Any]:
        if model.device.type == "cuda":  # compile and load the kernels outside the clock
            _continue(model, tokenizer, input_ids, make_cache(), 2, lambda done: None)
        cache, report = make_cache(), partial(on_step, f"Generating, {name}")
        continuation = _continue(
            model, tokenizer, input_ids, cache, max_new_tokens, lambda done: report(done, max_new_tokens)
        )
        report(*[len(continuation.tokens)] * 2)  # the answer may have ended early
        return continuation, cache

    from_dense, _ = generated("dense cache", partial(DynamicCache, config=model.config))
    from_kvarn, cache = generated(config.name, kvarn)
    stage, forwards, done = "Comparing distributions", 2 * -(-length // BLOCK), itertools.count(1)
    on_step(stage, 0, forwards)
    handle = model.register_forward_hook(lambda *_: on_step(stage, next(done), forwards))
    try:
        comparison = pseudo_decode(model, input_ids, kvarn, skip=length // 2)
    finally:
        handle.remove()
    pairs = enumerate(itertools.zip_longest(from_dense.tokens, from_kvarn.tokens))
    difference = next((i for i, (one, other) in pairs if one != other), None)
    return DemoResult(from_dense, from_kvarn, length, difference, comparison.mean, comparison.top1, cache)


def show(result: DemoResult, model: Any, tokenizer: Any, console: Console) -> None:
    """Print both texts, a table of what they took, and how far they differ."""
    dense, kvarn = both = result.dense, result.kvarn
    preset = result.cache.kvarn.name
    for name, continuation in (("Dense cache", dense), (preset, kvarn)):
        console.print(Panel(escape(continuation.text.strip()), title=name, title_align="left"))
    dtype = str(model.dtype).removeprefix("torch.")
    title = f"{result.prompt_tokens:,} prompt tokens + {len(kvarn.tokens)} new ones, {dtype} on {model.device}"
    made = table("", "dense cache", preset, title=title, names=("",))
    made.add_row("Cache", *(f"{c.cache_bytes / 2**20:.2f} MiB" for c in both))
    made.add_row("Times smaller", "", f"{dense.cache_bytes / kvarn.cache_bytes:.2f}")
    made.add_row("Time to first token", *(f"{c.first_token_seconds:.2f} s" for c in both))
    if all(len(c.tokens) > 1 for c in both):
        made.add_row("Then tokens per second", *(f"{c.tokens_per_second:.1f}" for c in both))
    console.print(made)
    for line in _remarks(result, model, tokenizer):
        console.print(escape(line), highlight=False)


class _Clock(BaseStreamer):
    """Notes when each new token arrives."""

    def __init__(self, device: torch.device, report: Callable[[int], None]) -> None:
        self.device, self.report = device, report
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        # generate() puts the prompt first: that call starts the clock.
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.times.append(time.perf_counter())
        self.report(len(self.times) - 1)

    def end(self) -> None: ...


def _continue(
    model: Any, tokenizer: Any, input_ids: torch.Tensor, cache: Any, max_new_tokens: int, report: Callable[[int], None]
) -> Continuation:
    clock = _Clock(model.device, report)
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        pad_token_id=pad,
        streamer=clock,
        **{cache_argument(model): cache},
    )
    tokens = output[0, input_ids.shape[1] :].tolist()
    start, first, *_, last = clock.times if len(clock.times) > 2 else [*clock.times, clock.times[-1]]
    rate = (len(tokens) - 1) / (last - first) if last > first else float("nan")
    dense = sum(tensor.nbytes for layer in cache.layers for tensor in tensors_in(vars(layer).values()))
    held = cache.memory_footprint() if isinstance(cache, KVarNCache) else dense
    return Continuation(tokens, tokenizer.decode(tokens, skip_special_tokens=True), held, first - start, rate)


def _remarks(result: DemoResult, model: Any, tokenizer: Any) -> list[str]:
    config, position = result.cache.kvarn, result.first_difference
    if position is None:
        lines = [f"All {len(result.dense.tokens)} new tokens are the same."]
    else:
        pieces = (repr(tokenizer.decode(c.tokens[position : position + 1])) for c in (result.dense, result.kvarn))
        lines = [f"First differing token: number {position + 1}, {' against '.join(pieces)}."]
    lines.append(
        f"Mean KL divergence over the prompt's second half: {result.kl:.2g} nats, the same most likely token at "
        f"{result.top1:.1%} of the positions (prompt fed in blocks of {BLOCK} tokens)."
    )
    if not config.packed_tiles(result.prompt_tokens):
        needed = config.sink_length + config.residual_length + config.tile_size
        lines.append(f"Nothing in the prompt was quantized: that begins at {needed} tokens.")
    if model.dtype == torch.float32:
        lines.append("Both caches were measured in float32; a 16-bit dense cache is half as large.")
    return lines
