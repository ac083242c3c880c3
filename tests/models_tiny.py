"""Tiny random models, one per kind of cache that Transformers knows.

The weights are large for their size, so that greedy decoding does not fall into a loop and tokens depend on the cache.
"""

from __future__ import annotations

import inspect
from functools import cache

import torch
import transformers as tf
from transformers import GenerationConfig, PreTrainedModel

VOCABULARY = 128

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "initializer_range": 0.2,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _llama(**changes):
    return tf.LlamaConfig(**{**_SIZES, **changes})


def _qwen2(**changes):
    return tf.Qwen2Config(**{**_SIZES, **changes})


def _qwen3(**changes):
    return tf.Qwen3Config(**{**_SIZES, "head_dim": 128, **changes})  # not hidden_size / num_attention_heads


def _phi3(**changes):
    sizes = {**_SIZES, "hidden_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
    return tf.Phi3Config(**{**sizes, "original_max_position_embeddings": 8192, **changes})  # head_dim 96


def _gemma3(**changes):
    layers = changes.get("num_hidden_layers", 3)
    types = ["sliding_attention", "full_attention", "sliding_attention"][:layers]
    sizes = {**_SIZES, "num_hidden_layers": layers, "head_dim": 32, "sliding_window": 16, "tie_word_embeddings": False}
    return tf.Gemma3TextConfig(**{**sizes, "layer_types": types, **changes})


def _gpt2(**changes):
    layers = changes.pop("num_hidden_layers", 2)
    return tf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=64, n_layer=layers, n_head=4, n_positions=2048, initializer_range=0.2, **changes
    )


def _gpt_neox(**changes):
    sizes = {name: value for name, value in _SIZES.items() if name != "num_key_value_heads"}
    return tf.GPTNeoXConfig(**{**sizes, **changes})


def _gpt_oss(**changes):
    sizes = {**_SIZES, "head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32}
    types = ["sliding_attention", "full_attention"][-changes.get("num_hidden_layers", 2) :]
    rope = {"rope_type": "default", "rope_theta": 150000.0}
    return tf.GptOssConfig(**{**sizes, "layer_types": types, "rope_parameters": rope, **changes})


def _deepseek_v3(**changes):
    latent = {"q_lora_rank": 32, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
    experts = {**_EXPERTS, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    sizes = {**_SIZES, "num_key_value_heads": 4}
    return tf.DeepseekV3Config(**{**sizes, **latent, **experts, **changes})


def _qwen3_next(**changes):
    layers = changes.get("num_hidden_layers", 4)
    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    experts = {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32}
    types = ["linear_attention"] * (layers - 1) + ["full_attention"]
    sizes = {**_SIZES, "num_hidden_layers": layers, "head_dim": 32}
    return tf.Qwen3NextConfig(**{**sizes, **linear, **experts, "layer_types": types, **changes})


_CONFIGS = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "phi3": _phi3,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": _deepseek_v3,
    "qwen3_next": _qwen3_next,
}

NAMES = tuple(_CONFIGS)
# Without a config a cache takes every layer for full attention: right for these.
FULL_ATTENTION = ("llama", "qwen2", "qwen3", "phi3", "gpt2", "gpt_neox", "deepseek_v3")
SLIDING = ("gemma3", "gpt_oss")
LINEAR = ("qwen3_next",)


def build(name: str, *, seed: int = 0, **changes) -> PreTrainedModel:
    """A fresh model of the kind ``name``, in float32, with fields of its config changed."""
    config = _CONFIGS[name](**changes)
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, None, None
    torch.manual_seed(seed)
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=None, eos_token_id=None)
    model.kind = name
    return model


@cache
def model(name: str) -> PreTrainedModel:
    """The shared model of that kind; not to be changed."""
    return build(name)


@cache
def gpu_model(name: str) -> PreTrainedModel:
    """:func:`model` on a GPU, in bfloat16; not to be changed."""
    return build(name).to("cuda", torch.bfloat16)


@cache
def draft(name: str) -> PreTrainedModel:
    """:func:`model` with noise on its weights: some of its drafts are accepted, some are not; not to be changed."""
    noisy = build(name)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in noisy.parameters():
            weight += 0.03 * weight.std() * torch.randn(weight.shape, generator=generator) if weight.numel() > 1 else 0
    noisy.generation_config.num_assistant_tokens = 4
    noisy.generation_config.assistant_confidence_threshold = 0.0
    return noisy


def prompt(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids ``[batch, length]`` without the padding token 0."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator)


def left_padded(lengths: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """``input_ids`` and ``attention_mask`` of rows with those lengths, padded on the left to the longest."""
    ids = prompt(len(lengths), max(lengths), seed)
    position = torch.arange(max(lengths))
    mask = position >= max(lengths) - torch.tensor(lengths)[:, None]
    return {"input_ids": torch.where(mask, ids, 0), "attention_mask": mask.long()}


# Transformers 5.24 renamed the argument that older ones call past_key_values.
CACHE_NAME = "cache" if "cache" in inspect.signature(tf.LlamaForCausalLM.forward).parameters else "past_key_values"


def forward(model: PreTrainedModel, input_ids: torch.Tensor, cache: tf.Cache, **kwargs) -> torch.Tensor:
    """One forward pass through ``cache``; the logits ``[batch, tokens, vocabulary]``."""
    with torch.no_grad():
        return model(input_ids=input_ids.to(model.device), use_cache=True, **{CACHE_NAME: cache}, **kwargs).logits
