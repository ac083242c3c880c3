"""What quantizing does to each layer and KV head of a model: outlier channels and tokens, and the error of attention.

The text runs through the model once, densely. Every full-attention layer's keys and values are quantized as a cache
would, and the queries of some positions attend to both, so each layer is judged alone: by how far its attention weights
and its output move, and not by how well keys are reconstructed, which does not predict that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers.masking_utils import sdpa_mask

from kvarn_hf import ops
from kvarn_hf.attention import kvarn_attention
from kvarn_hf.cache import KVarNCache
from kvarn_hf.config import KVarNConfig
from kvarn_hf.evaluation.states import replaced_attention
from kvarn_hf.layers.growing import KVarNLayer
from kvarn_hf.method.attention import attention_weights
from kvarn_hf.terminal import OnStep

# A channel this many times as large as its head's median channel is an outlier: keys of models without a bias stay
# below 14, key biases reach 20 to 100. So is one that varies this many times as much: the pre-scale is then full.
LARGE_CHANNEL = 16.0
VARYING_CHANNEL = 8.0

_NAME = "kvarn-inspect"
_QUERIES = 128


class OutlierChannel(NamedTuple):
    """A channel of one KV head that is far larger than the others.

    ``size`` is its root mean square over the tokens, and ``spread`` its standard deviation, each as a multiple of the
    head's median channel. Without spread it is a constant offset, which a zero point takes in.
    """

    side: str
    head: int
    channel: int
    size: float
    spread: float


class OutlierToken(NamedTuple):
    """The longest key or value vector outside the sinks, as a multiple of its head's median one."""

    side: str
    head: int
    position: int
    size: float


@dataclass(frozen=True)
class AttentionError:
    """How quantized keys and values move a layer's attention, over each KV head's query heads and positions,
    ``[heads]``: ``kl`` is the mean KL(exact || quantized) of the weights in nats, ``output`` is ``|o - o_hat| / |o|``
    of the output, and ``keys_only`` and ``values_only`` are the same with one side quantized."""

    kl: torch.Tensor
    output: torch.Tensor
    keys_only: torch.Tensor
    values_only: torch.Tensor


@dataclass(frozen=True)
class LayerInspection:
    """One full-attention layer.

    For ``"keys"`` and ``"values"``, ``channel_size`` and ``channel_spread`` are ``[heads, channels]`` (see
    :class:`OutlierChannel`), and ``token_size`` is ``[heads, tokens]`` (see :class:`OutlierToken`). The first
    ``sink_length`` tokens are never quantized. ``errors`` are by preset.
    """

    layer: int
    key_dim: int
    value_dim: int
    channel_size: dict[str, torch.Tensor]
    channel_spread: dict[str, torch.Tensor]
    token_size: dict[str, torch.Tensor]
    sink_length: int
    errors: dict[str, AttentionError]

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.channel_size["keys"].shape[0]

    @property
    def outlier_channels(self) -> list[OutlierChannel]:
        """Channels of keys and values that are too large or vary too much, the largest first."""
        found = []
        for side, size in self.channel_size.items():
            spread = self.channel_spread[side]
            for place in ((size >= LARGE_CHANNEL) | (spread >= VARYING_CHANNEL)).nonzero().tolist():
                found.append(OutlierChannel(side, *place, *(x[tuple(place)].item() for x in (size, spread))))
        return sorted(found, key=lambda outlier: -max(outlier.size, outlier.spread))

    def worst_token(self, side: str) -> OutlierToken:
        """The longest vector among ``"keys"`` or ``"values"`` that is quantized."""
        size = self.token_size[side][:, self.sink_length :]
        head, token = divmod(int(size.argmax()), size.shape[1])
        return OutlierToken(side, head, self.sink_length + token, size[head, token].item())


def inspect_layers(
    model: Any,
    input_ids: torch.Tensor,
    presets: Sequence[KVarNConfig],
    on_step: OnStep = lambda stage, done, total: None,
) -> list[LayerInspection]:
    """Judge every layer that a :class:`~kvarn_hf.KVarNCache` would quantize.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    input_ids : torch.Tensor
        ``[1, tokens]``, int64; more tokens than :func:`first_quantized_read` of every preset.
    presets : sequence of KVarNConfig
        The settings to compare, with the same ``sink_length``.
    on_step : OnStep

    Raises
    ------
    ValueError
        If the model's attention cannot be watched, or the text is too short.
    """
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(f"model of type {config.model_type!r} caches latent states, which inspect cannot follow")
    needed = 1 + max(map(first_quantized_read, presets))
    if input_ids.shape[0] != 1 or input_ids.shape[1] < needed:
        raise ValueError(f"input_ids must have shape [1, {needed} or more], got {list(input_ids.shape)}")
    wanted = [i for i, x in enumerate(KVarNCache(model.config).layers) if isinstance(x, KVarNLayer)]
    found: dict[int, LayerInspection] = {}

    def watch(module: torch.nn.Module, *states: Any, **options: Any) -> Any:
        index = getattr(module, "layer_idx", None)
        if index in wanted and index not in found:
            found[index] = _inspect(index, states[:3], presets, options)
            on_step("attention of each layer", len(found), len(wanted))
        return kvarn_attention(module, *states, **options)

    on_step("attention of each layer", 0, len(wanted))
    with replaced_attention(model, _NAME, watch, sdpa_mask), torch.inference_mode():
        model(input_ids.to(model.device), use_cache=False, logits_to_keep=1)
    if len(found) < len(wanted) or not wanted:
        raise ValueError(
            f"model of type {config.model_type!r} does its attention where inspect cannot watch it: "
            f"{len(found)} of {len(wanted)} full-attention layers were seen"
        )
    return [found[index] for index in wanted]


def first_quantized_read(config: KVarNConfig) -> int:
    """The first position that attends to a packed tile: it is still dense when the tile's last token arrives."""
    return config.sink_length + config.tile_size + config.residual_length


def _inspect(
    index: int,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    presets: Sequence[KVarNConfig],
    options: dict[str, Any],
) -> LayerInspection:
    """``states`` are the layer's queries, keys and values."""
    sink, (_, key, value) = presets[0].sink_length, states
    size, spread, token_size = {}, {}, {}
    for side, x in {"keys": key[0].float(), "values": value[0].float()}.items():
        behind = x[:, sink:]
        size[side] = _to_median(behind.square().mean(1).sqrt()).cpu()
        spread[side] = _to_median(behind.std(1, correction=0)).cpu()
        norm = x.norm(dim=-1)
        token_size[side] = (norm / norm[:, sink:].median(-1, keepdim=True).values.clamp_min(1e-30)).cpu()
    errors = {preset.name: _attention_error(*states, preset, options) for preset in presets}
    return LayerInspection(index, key.shape[3], value.shape[3], size, spread, token_size, sink, errors)


def _to_median(x: torch.Tensor) -> torch.Tensor:
    median = x.median(-1, keepdim=True).values
    return torch.where(median > 0, x / torch.where(median > 0, median, 1.0), 1.0)


def _attention_error(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, config: KVarNConfig, options: dict[str, Any]
) -> AttentionError:
    """Of queries spread over the text, each reading what would be packed by its time quantized and the rest exactly."""
    layer = KVarNLayer(config)
    layer.update(key, value)
    assert layer.state is not None
    stored_key, stored_value = ops.dense(layer.state)
    tokens, heads, first = key.shape[2], key.shape[1], first_quantized_read(config)
    at = torch.linspace(first, tokens - 1, min(_QUERIES, tokens - first), device=key.device).long()
    token = torch.arange(tokens, device=key.device)
    past = token <= at[:, None]
    # Before position t, t tokens are held, and the tiles due by then are packed.
    held = (at - config.sink_length - config.residual_length).div(config.tile_size, rounding_mode="floor")
    packed = (token >= config.sink_length) & (token < config.sink_length + held[:, None] * config.tile_size)

    scaling = query.shape[3] ** -0.5 if options.get("scaling") is None else options["scaling"]

    def weights_of(keys: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """``[heads, group, query, keys]``, float32."""
        keys = keys.float().repeat_interleave(query.shape[1] // heads, 1)
        scores = query[:, :, at].float() @ keys.mT * scaling
        found = attention_weights(scores, mask, softcap=options.get("softcap"), sinks=options.get("s_aux"))
        return found[0].unflatten(0, (heads, -1))

    weights = weights_of(key, past)
    # Both versions of every key side by side, of which each query sees one.
    both = weights_of(torch.cat([key, stored_key], 2), torch.cat([past & ~packed, packed], 1))
    moved = both[..., :tokens] + both[..., tokens:]
    smallest = torch.finfo(torch.float32).tiny  # what underflows weighs nothing
    exact_log, moved_log = (x.clamp_min(smallest).log() for x in (weights, moved))
    kl = (weights * (exact_log - moved_log)).sum(-1).clamp_min(0.0)
    values, change = (x[0].float().unsqueeze(1) for x in (value, stored_value - value))  # [heads, 1, tokens, channels]
    output = weights @ values

    def relative(other: torch.Tensor) -> torch.Tensor:
        error, energy = (x.square().sum((1, 2, 3)) for x in (other - output, output))
        return (error / energy.clamp_min(1e-30)).sqrt().cpu()

    def read(by: torch.Tensor) -> torch.Tensor:
        return by @ values + (by * packed) @ change

    reads = read(moved), moved @ values, read(weights)
    return AttentionError(kl.mean((1, 2)).cpu(), *map(relative, reads))
