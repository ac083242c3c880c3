"""The suite ``tensor``: what quantization does to keys, values and attention outputs, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvarn_hf.attention import kvarn_attention, kvarn_mask
from kvarn_hf.evaluation.blocks import block_lengths, logits_in_blocks
from kvarn_hf.evaluation.caches import CacheSpec, cache_spec, full_attention_layers
from kvarn_hf.evaluation.pseudo_decode import BLOCK, HISTORIES
from kvarn_hf.evaluation.runner import Run
from kvarn_hf.evaluation.states import RecordingCache, States, joined, replaced_attention, watch
from kvarn_hf.evaluation.texts import Plan, measure_texts
from kvarn_hf.method.errors import token_errors

KEY = ("text", "cache", "tokens", "dtype", "history")
# Tokens that every cache has quantized: behind the sinks, and before the tail and the newest block.
FIRST, LAST = 128, 256
WORST = 0.05
_RECORDED = "kvarn-recorded"


def vector_errors(exact: torch.Tensor, read: torch.Tensor) -> dict[str, torch.Tensor]:
    """How token vectors ``[rows, heads, tokens, head_dim]`` differ, in each row: a dict of ``[rows]``, float32.

    ``relative_error`` (Frobenius norms), ``magnitude_share`` (of the squared error), ``worst_magnitude_share`` (of the
    5 % of vectors with the largest error), ``worst_error_share`` (how much of all squared error those 5 % hold),
    ``norm_error`` and ``norm_error_p999`` (mean and 99.9th percentile of ``abs(|k_hat| / |k| - 1)``): figure 1 of
    KVarN, arXiv:2606.03458, with magnitude as in :class:`~kvarn_hf.method.errors.TokenErrors`.
    """
    exact, read = exact.float(), read.float()
    parts = token_errors(exact, read)
    magnitude, direction = parts.magnitude.flatten(1), parts.direction.flatten(1)  # [rows, vectors]
    error = magnitude + direction
    norm, norm_read = exact.norm(dim=-1).flatten(1), read.norm(dim=-1).flatten(1)
    total = error.sum(1)
    worst = error.topk(max(1, round(WORST * error.shape[1])), 1)
    worst_error = worst.values.sum(1)
    norm_error = torch.where(norm > 0, (norm_read / norm.clamp_min(1e-30) - 1).abs(), 0.0)
    rank = min(error.shape[1], round(0.999 * error.shape[1]) + 1)
    return {
        "relative_error": (total / exact.square().sum((1, 2, 3)).clamp_min(1e-30)).sqrt(),
        "magnitude_share": magnitude.sum(1) / total.clamp_min(1e-30),
        "worst_magnitude_share": magnitude.gather(1, worst.indices).sum(1) / worst_error.clamp_min(1e-30),
        "worst_error_share": worst_error / total.clamp_min(1e-30),
        "norm_error": norm_error.mean(1),
        "norm_error_p999": norm_error.kthvalue(rank, 1).values,
    }


def attention_error(
    query: torch.Tensor, scaling: float | None, exact: tuple[torch.Tensor, ...], read: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Relative error of the newest tokens' attention outputs, ``[rows]``, float32.

    ``query`` is ``[rows, query_heads, new, head_dim]``, ``scaling`` the factor of the scores, None for ``head_dim **
    -0.5``, and ``exact`` and ``read`` are keys and values ``[rows, heads, tokens, head_dim]``, the new ones last.
    """
    new, tokens = query.shape[2], exact[0].shape[2]
    mask = torch.ones(new, tokens, dtype=torch.bool, device=query.device).tril(tokens - new)
    attend = partial(scaled_dot_product_attention, query.float(), attn_mask=mask, scale=scaling, enable_gqa=True)
    want, got = (attend(keys.float(), values.float()) for keys, values in (exact, read))
    return (got - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)


@contextmanager
def recorded_queries(model: Any) -> Iterator[dict[int, tuple[torch.Tensor, float | None]]]:
    """Each layer's newest queries ``[rows, query_heads, new, head_dim]`` and scaling, while the model runs."""
    queries: dict[int, tuple[torch.Tensor, float | None]] = {}

    def attend(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        queries[module.layer_idx] = query, kwargs.get("scaling")
        return kvarn_attention(module, query, *args, **kwargs)

    with replaced_attention(model, _RECORDED, attend, kvarn_mask):
        yield queries


class DenseStates:
    """The dense run over some texts: what its full-attention layers hold, and the newest block's queries."""

    def __init__(self, model: Any, input_ids: torch.Tensor) -> None:
        self.input_ids = input_ids.to(model.device)
        self.lengths = block_lengths(input_ids.shape[1], BLOCK)
        cache = RecordingCache(model.config)
        with recorded_queries(model) as queries:
            self._run(model, cache)
        self.states, self.queries = cache.states, dict(queries)
        self.layers = full_attention_layers(model.config)

    def read(self, model: Any, cache: Any, history: str) -> States:
        """What attention reads of the texts in the last block, through an empty cache."""
        if history == "accumulated":
            read = watch(cache)
            self._run(model, cache)
            return read
        return {layer: cache.update(*states[layer], layer) for states in self.states for layer in states}

    def compare(self, read: States) -> list[dict[str, Any]]:
        """For each row a dict of lists over the layers."""
        measured = []
        for layer in self.layers:
            exact = joined(self.states, layer)
            held = slice(FIRST, exact[0].shape[2] - LAST)
            figures: dict[str, torch.Tensor] = {}
            for kind, whole, got in zip(("key", "value"), exact, read[layer], strict=True):
                errors = vector_errors(whole[:, :, held], got[:, :, held])
                figures |= {f"{kind}_{name}": value for name, value in errors.items()}
            figures["attention_error"] = attention_error(*self.queries[layer], exact, read[layer])
            measured.append(figures)
        table = torch.stack([torch.stack([*figures.values()]) for figures in measured]).cpu()  # [layer, name, row]
        return [dict(zip(measured[0], row.tolist(), strict=True)) for row in table.permute(2, 1, 0)]

    def _run(self, model: Any, cache: Any) -> None:
        for _ in logits_in_blocks(model, self.input_ids, cache, self.lengths, skip=self.input_ids.shape[1] - 1):
            pass


def measure(
    run: Run,
    texts: Sequence[Path],
    caches: Sequence[str],
    lengths: Sequence[int],
    histories: Sequence[str] = HISTORIES,
    batch: int = 1,
) -> None:
    """Measure every combination that is not in the results yet; see :func:`kvarn_hf.evaluation.divergence.measure`."""
    short = [count for count in lengths if count <= FIRST + LAST]
    if short:
        raise ValueError(f"tokens must be more than {FIRST + LAST} for the suite tensor, got {short[0]}")
    specs = [spec for spec in map(cache_spec, caches) if spec.reads_in_blocks]

    def compare(
        dense: DenseStates, model: Any, cache: Any, spec: CacheSpec, history: str
    ) -> tuple[list[dict[str, Any]], str]:
        rows = dense.compare(dense.read(model, cache, history))
        means = {name: fmean(value for row in rows for value in row[name]) for name in rows[0]}
        return [{"layers": dense.layers} | row for row in rows], (
            "relative error of keys {key_relative_error:.3f}, values {value_relative_error:.3f}, attention "
            "{attention_error:.4f}, magnitude share of the keys' worst {key_worst_magnitude_share:.3f}"
        ).format(**means)

    plan = Plan(texts, specs, lengths, histories, batch)
    with torch.inference_mode():
        measure_texts(run, run.results("tensor", KEY), plan, DenseStates, compare)
