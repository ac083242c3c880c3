"""``kvarn inspect``: which layers, heads, channels and tokens of a model quantize worst, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvarn_hf.cache import KVarNCache
from kvarn_hf.config import KVarNConfig
from kvarn_hf.evaluation.pseudo_decode import dense_reference
from kvarn_hf.inspect.layers import LayerInspection, first_quantized_read, inspect_layers
from kvarn_hf.terminal import OnStep

# How many of the worst layers are left dense, in turn: first to show what it brings, then only where it is needed.
_SHOWN_SKIPS = (1, 2, 4)
_MORE_SKIPS = (3, 6, 8)


@dataclass(frozen=True)
class Trial:
    """One setting that was measured: ``kl`` is the mean KL(dense || quantized) of the next-token distributions over the
    text in nats, ``top1`` the share of positions with the same most likely token, and ``bytes_per_token`` that of all
    full-attention layers in the long run, those skipped at 16 bits per element."""

    config: KVarNConfig
    skip_layers: tuple[int, ...]
    kl: float
    top1: float
    bytes_per_token: float

    @property
    def name(self) -> str:
        """The preset, and what is skipped."""
        if not self.skip_layers:
            return self.config.name
        return f"{self.config.name}, skipping {', '.join(map(str, self.skip_layers))}"


@dataclass(frozen=True)
class Inspection:
    """What :func:`inspect_model` found.

    ``layers`` are judged by ``config``. ``widths`` are trials of every preset with no layer skipped, the smallest
    first, and ``skips`` leave the worst layers dense. The suggestion is the smallest preset that stays within
    ``max_kl`` nats; if none does, as few of the worst layers left dense as it takes; if that does not help either, the
    trial with the lowest KL. ``dense_bytes_per_token`` counts 16 bits per element.
    """

    config: KVarNConfig
    tokens: int
    layers: list[LayerInspection]
    widths: list[Trial]
    skips: list[Trial]
    max_kl: float
    suggestion: Trial
    dense_bytes_per_token: float

    @property
    def outlier_layers(self) -> list[LayerInspection]:
        """Layers with outlier channels in their keys."""
        return [layer for layer in self.layers if any(c.side == "keys" for c in layer.outlier_channels)]

    @property
    def worst_layers(self) -> list[LayerInspection]:
        """All layers, those whose attention output moves most first."""
        return worst_first(self.layers, self.config.name)


def inspect_model(
    model: Any,
    input_ids: torch.Tensor,
    config: KVarNConfig,
    presets: Sequence[KVarNConfig],
    max_kl: float = 0.01,
    on_step: OnStep = lambda stage, done, total: None,
) -> Inspection:
    """Run a text through a model and see what quantizing its cache does.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model.
    input_ids : torch.Tensor
        ``[1, tokens]``, int64. Distributions are compared from the first position on that reads a packed tile.
    config : KVarNConfig
        The setting to judge layers by, and to leave layers dense with.
    presets : sequence of KVarNConfig
        The widths to compare; ``config`` is added if it is not among them.
    max_kl : float
        The mean KL divergence, in nats, that a suggestion may cost.
    on_step : OnStep

    Raises
    ------
    ValueError
        If the text is too short, ``max_kl`` is not positive, or the model's attention cannot be watched.
    """
    if not max_kl > 0:
        raise ValueError(f"max_kl must be above 0, got {max_kl}")
    presets = list(presets) if config in presets else [config, *presets]
    layers = inspect_layers(model, input_ids, presets, on_step)
    ranked = [layer.layer for layer in worst_first(layers, config.name)]
    counts = [n for n in (*_SHOWN_SKIPS, *_MORE_SKIPS) if n < len(layers)]
    shown = [n for n in counts if n in _SHOWN_SKIPS]
    stage, done, total = "logits of each setting", 0, 1 + len(presets) + len(shown)
    on_step(stage, done, total)
    reference = dense_reference(model, input_ids, skip=max(map(first_quantized_read, presets)))

    def measure(setting: KVarNConfig, skips: int = 0) -> Trial:
        nonlocal done
        done += 1
        on_step(stage, done, max(total, done + 1))
        skipped = tuple(sorted(ranked[:skips]))
        result = reference.compare(model, KVarNCache(model.config, setting, skip_layers=skipped))
        return Trial(setting, skipped, result.mean, result.top1, bytes_per_token(layers, setting, skipped))

    widths = sorted(map(measure, presets), key=lambda trial: trial.bytes_per_token)
    skips = [measure(config, n) for n in shown]
    enough = [trial for trial in widths if trial.kl <= max_kl]
    if not enough:
        for n in counts:
            if n not in _SHOWN_SKIPS and not any(trial.kl <= max_kl for trial in skips):
                skips.append(measure(config, n))
        enough = [trial for trial in skips if trial.kl <= max_kl]
    on_step(stage, done + 1, done + 1)
    smallest = min(enough, key=lambda trial: trial.bytes_per_token, default=None)
    suggestion = smallest or min((*widths, *skips), key=lambda trial: trial.kl)
    dense = bytes_per_token(layers, config, [layer.layer for layer in layers])
    return Inspection(config, input_ids.shape[1], layers, widths, skips, max_kl, suggestion, dense)


def worst_first(layers: Sequence[LayerInspection], preset: str) -> list[LayerInspection]:
    """Layers in the order in which their attention output moves, over all heads, the most first."""
    return sorted(layers, key=lambda layer: -layer.errors[preset].output.square().mean().item())


def bytes_per_token(layers: Sequence[LayerInspection], config: KVarNConfig, skipped: Sequence[int]) -> float:
    """What one more token adds to these layers in the long run, those skipped at 16 bits per element."""
    total = 0.0
    for layer in layers:
        bits = 16.0 if layer.layer in skipped else config.bits_per_element(layer.key_dim, layer.value_dim)
        total += layer.heads * (layer.key_dim + layer.value_dim) * bits / 8
    return total
