"""A text through a model and a cache, block by block, as if it were being generated."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which the model takes a cache: Transformers renamed it in 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def block_lengths(tokens: int, block: int, first: int | None = None) -> list[int]:
    """Lengths of blocks of ``block`` tokens that make up ``tokens``; the first may have another length.

    >>> block_lengths(10, 4), block_lengths(10, 4, first=1)
    ([4, 4, 2], [1, 4, 4, 1])
    """
    lengths = [min(tokens, first)] if first else []
    rest = tokens - sum(lengths)
    return lengths + [block] * (rest // block) + ([rest % block] if rest % block else [])


def logits_in_blocks(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    cache: Any,
    lengths: Sequence[int],
    skip: int = 0,
    attention_mask: torch.Tensor | None = None,
) -> Iterator[torch.Tensor]:
    """Run a text through a cache in blocks, and yield the logits of each.

    Parameters
    ----------
    input_ids : torch.Tensor
        ``[rows, tokens]``, int64.
    cache : transformers.Cache
        Empty.
    lengths : sequence of int
        Of the blocks, ``tokens`` together.
    skip : int
        Logits of the first ``skip`` positions are not computed.
    attention_mask : torch.Tensor, optional
        ``[rows, tokens]``, int64, zero for left padding. None: there is none.

    Yields
    ------
    torch.Tensor
        ``[rows, positions, vocabulary]`` from position ``skip`` on, in the model's dtype; blocks before it yield none.
    """
    start = 0
    positions = None if attention_mask is None else (attention_mask.cumsum(1) - 1).clamp_min(0)
    for length in lengths:
        end = start + length
        keep = min(length, end - skip)
        extra: dict[str, Any] = {cache_argument(model): cache}
        if attention_mask is not None and positions is not None:
            extra |= {"attention_mask": attention_mask[:, :end], "position_ids": positions[:, start:end]}
        with torch.inference_mode():
            # Logits are the largest tensors here: the model makes only those that are asked for (0 would mean all).
            logits = model(input_ids[:, start:end], use_cache=True, logits_to_keep=max(keep, 1), **extra).logits
        if keep > 0:
            yield logits
        start = end
