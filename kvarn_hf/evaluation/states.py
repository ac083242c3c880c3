"""Keys and values as they pass between a model and its cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.cache_utils import DynamicCache

# What each layer gave the cache in one forward pass: keys and values, [rows, heads, tokens, head_dim].
States: TypeAlias = dict[int, tuple[torch.Tensor, torch.Tensor]]


class RecordingCache(DynamicCache):
    """The dense cache, which also keeps what it is given, forward pass by forward pass, in ``states``."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.states: list[States] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As in the base class."""
        if not self.states or layer_idx in self.states[-1]:
            self.states.append({})
        self.states[-1][layer_idx] = key_states, value_states
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def store_instead(cache: Any, states: list[States]) -> None:
    """Let ``cache`` store recorded states, pass by pass, instead of those that the model gives it.

    Attention still sees the model's own newest keys and values, behind what the cache makes of the recorded ones.
    """
    update = cache.update
    passes: dict[int, int] = {}

    def replay(key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        recorded = states[passes.get(layer_idx, 0)][layer_idx]
        passes[layer_idx] = passes.get(layer_idx, 0) + 1
        read = update(*recorded, layer_idx, *args, **kwargs)
        pairs = zip(read, (key_states, value_states), strict=True)
        return tuple(torch.cat([old[:, :, : -new.shape[2]], new], 2) for old, new in pairs)

    cache.update = replay


def watch(cache: Any) -> States:
    """What attention last read from each layer of ``cache``; the dictionary changes as the cache is used."""
    update, read = cache.update, {}

    def remember(key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        read[layer_idx] = update(key_states, value_states, layer_idx, *args, **kwargs)
        return read[layer_idx]

    cache.update = remember
    return read


@contextmanager
def replaced_attention(model: Any, name: str, attend: Callable[..., Any], mask: Callable[..., Any]) -> Iterator[None]:
    """Let the model call ``attend`` as its attention function, with masks that ``mask`` makes; Transformers knows the
    two under ``name``."""
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, mask)
    before = model.config.get_text_config(decoder=True)._attn_implementation
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(before)


def joined(states: list[States], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all passes, ``[rows, heads, tokens, head_dim]``."""
    keys, values = zip(*(one[layer] for one in states), strict=True)
    return torch.cat(keys, 2), torch.cat(values, 2)
