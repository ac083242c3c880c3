"""How far a quantized cache moves a model's next-token distributions, measured as the KVarN paper does.

The text runs through the cache in blocks, as if it were being generated: before a block runs, every tile that is due
has been quantized, once, from the values the model produced then, so errors accumulate as they do in decoding. The
dense cache sees the same blocks, so that both runs compute on the same shapes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

BLOCK = 128
SKIP = 384


@dataclass(frozen=True)
class PseudoDecodeResult:
    """What the quantized cache changed, position by position.

    Parameters
    ----------
    kl : torch.Tensor
        ``[positions]``, float32, in nats: KL(dense || quantized) of the next-token distribution at each position.
    agrees : torch.Tensor
        ``[positions]``, bool: whether both distributions have the same most likely token.
    """

    kl: torch.Tensor
    agrees: torch.Tensor

    @property
    def mean(self) -> float:
        """Mean KL divergence in nats."""
        return self.kl.mean().item()

    @property
    def median(self) -> float:
        """Median KL divergence in nats."""
        return self.kl.quantile(0.5).item()

    @property
    def p999(self) -> float:
        """99.9th percentile of the KL divergence in nats, interpolated linearly."""
        return self.kl.quantile(0.999).item()

    @property
    def max(self) -> float:
        """Largest KL divergence in nats."""
        return self.kl.max().item()

    @property
    def top1(self) -> float:
        """Share of positions at which the most likely token is the same."""
        return self.agrees.float().mean().item()


@dataclass(frozen=True)
class DenseReference:
    """The dense cache's distributions over a text, computed once and compared with any number of quantized caches.

    Build with :func:`dense_reference`; 1,024 tokens of a vocabulary of 150,000 hold 400 MB, in float32 on the CPU.

    Parameters
    ----------
    input_ids : torch.Tensor
        ``[1, tokens]``, int64.
    log_probs : list of torch.Tensor
        For every block, ``[positions, vocabulary]``, float32, on the CPU; positions before ``skip`` are left out.
    block, skip : int
        Tokens per forward pass, and the first position that is measured.
    """

    input_ids: torch.Tensor
    log_probs: list[torch.Tensor]
    block: int
    skip: int

    def compare(self, model: PreTrainedModel, cache: Any) -> PseudoDecodeResult:
        """Run the text through an empty ``cache`` of the same model.

        Parameters
        ----------
        model : transformers.PreTrainedModel
            The model of :func:`dense_reference`.
        cache : transformers.Cache
            Empty, for instance a :class:`~kvarn_hf.KVarNCache` whose sinks and residual have the length of a block.

        Returns
        -------
        PseudoDecodeResult
        """
        kl, agrees = [], []
        blocks = _log_probs(model, self.input_ids, cache, self.block, self.skip)
        for dense, quantized in zip(self.log_probs, blocks, strict=True):
            block_kl, block_agrees = _compare(dense.to(quantized.device), quantized)
            kl.append(block_kl)
            agrees.append(block_agrees)
        return PseudoDecodeResult(torch.cat(kl), torch.cat(agrees))


def dense_reference(
    model: PreTrainedModel, input_ids: torch.Tensor, block: int = BLOCK, skip: int = SKIP
) -> DenseReference:
    """Run a text through the dense cache and keep its next-token distributions.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model.
    input_ids : torch.Tensor
        ``[1, tokens]``, int64, more than ``skip`` of them.
    block : int
        Tokens per forward pass.
    skip : int
        First position that is measured: with sinks, residual and tiles of 128 tokens, 384 is the first to read a tile.

    Raises
    ------
    ValueError
        If the text is no single row, or not longer than ``skip``, or ``block`` is not positive.
    """
    input_ids = _validated(model, input_ids, block, skip)
    blocks = _log_probs(model, input_ids, DynamicCache(config=model.config), block, skip)
    return DenseReference(input_ids, [part.cpu() for part in blocks], block, skip)


def pseudo_decode(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    make_cache: Callable[[], Any],
    block: int = BLOCK,
    skip: int = SKIP,
) -> PseudoDecodeResult:
    """Measure KL(dense || quantized) of the next-token distributions in pseudo-decode.

    Both caches run side by side, so that no more than one block's logits are held. To measure many caches on one text,
    run the dense one once: :func:`dense_reference`.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model.
    input_ids : torch.Tensor
        ``[1, tokens]``, int64, more than ``skip`` of them.
    make_cache : callable
        Called once without arguments; returns an empty cache.
    block : int
        Tokens per forward pass.
    skip : int
        First position that is measured.

    Returns
    -------
    PseudoDecodeResult

    Raises
    ------
    ValueError
        As in :func:`dense_reference`.

    Notes
    -----
    The protocol of KVarN, arXiv:2606.03458. Before a block runs, a :class:`~kvarn_hf.KVarNCache` with ``sink_length``
    and ``residual_length`` of one block has quantized every tile behind the sinks and before the newest block.

    Examples
    --------
    >>> result = pseudo_decode(model, ids, lambda: KVarNCache(model.config, "kvarn_k4v2_g128"))  # doctest: +SKIP
    >>> print(f"{result.mean:.4f} nats, top-1 {result.top1:.3f}")  # doctest: +SKIP
    """
    input_ids = _validated(model, input_ids, block, skip)
    dense = _log_probs(model, input_ids, DynamicCache(config=model.config), block, skip)
    quantized = _log_probs(model, input_ids, make_cache(), block, skip)
    kl, agrees = zip(*(_compare(p, q) for p, q in zip(dense, quantized, strict=True)), strict=True)
    return PseudoDecodeResult(torch.cat(kl), torch.cat(agrees))


def _log_probs(
    model: PreTrainedModel, input_ids: torch.Tensor, cache: Any, block: int, skip: int
) -> Iterator[torch.Tensor]:
    """The log-probabilities of each block's positions from ``skip`` on, ``[positions, vocabulary]``, float32."""
    # Transformers renamed the argument in 5.24.
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    start = 0
    for ids in input_ids.split(block, 1):
        wanted = min(ids.shape[1], start + ids.shape[1] - skip)
        # Logits are the largest tensors here: ask the model only for those that are measured (0 would mean all).
        with torch.inference_mode():
            output = model(ids, use_cache=True, logits_to_keep=max(wanted, 1), **{argument: cache})
            part = output.logits[0].float().log_softmax(-1) if wanted > 0 else None
        if part is not None:
            yield part
        start += ids.shape[1]


def _compare(dense: torch.Tensor, quantized: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kl = (dense.exp() * (dense - quantized)).sum(-1).clamp_min(0)  # rounding may leave a tiny negative sum
    return kl.cpu(), (dense.argmax(-1) == quantized.argmax(-1)).cpu()


def _validated(model: PreTrainedModel, input_ids: torch.Tensor, block: int, skip: int) -> torch.Tensor:
    if block < 1:
        raise ValueError(f"block must be at least 1, got {block}")
    if skip < 0:
        raise ValueError(f"skip must not be negative, got {skip}")
    if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] <= skip:
        raise ValueError(
            f"input_ids must have shape [1, tokens] with more than skip = {skip} tokens, got {list(input_ids.shape)}"
        )
    return input_ids.to(model.device)
