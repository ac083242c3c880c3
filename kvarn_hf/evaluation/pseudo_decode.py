"""How far a quantized cache moves a model's next-token distributions, measured as the KVarN paper does.

The text runs through the cache in blocks, as if it were being generated: before a block runs, every tile that is due
has been quantized, once. *Accumulated*: from the values the model produced then, so errors accumulate as they do in
decoding. *Static*: from the dense run's values, so that every position shows the error of one reading alone. The dense
cache sees the same blocks, so that both runs compute on the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from kvarn_hf.evaluation.blocks import block_lengths, logits_in_blocks
from kvarn_hf.evaluation.states import RecordingCache, States, store_instead

BLOCK = 128
SKIP = 384
HISTORIES = ("accumulated", "static")


@dataclass(frozen=True)
class PseudoDecodeResult:
    """What the quantized cache changed, position by position.

    Parameters
    ----------
    kl : torch.Tensor
        ``[rows, positions]``, float32, in nats: KL(dense || quantized) of the next-token distribution at each position.
    agrees : torch.Tensor
        ``[rows, positions]``, bool: whether both distributions have the same most likely token.
    loss_change : torch.Tensor
        ``[rows, positions - 1]``, float32, in nats: how much more the quantized run's loss is on the text's next token.
    """

    kl: torch.Tensor
    agrees: torch.Tensor
    loss_change: torch.Tensor

    @property
    def mean(self) -> float:
        """Mean KL divergence in nats."""
        return self.kl.mean().item()

    @property
    def median(self) -> float:
        """Median KL divergence in nats."""
        return self._quantile(0.5)

    @property
    def p999(self) -> float:
        """99.9th percentile of the KL divergence in nats, interpolated linearly."""
        return self._quantile(0.999)

    @property
    def max(self) -> float:
        """Largest KL divergence in nats."""
        return self.kl.max().item()

    @property
    def top1(self) -> float:
        """Share of positions at which the most likely token is the same."""
        return self.agrees.float().mean().item()

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity of the text by the quantized run, over that by the dense run."""
        return self.loss_change.mean().exp().item()

    def rows(self, start: int, count: int = 1) -> PseudoDecodeResult:
        """Some rows' part."""
        chosen = slice(start, start + count)
        return PseudoDecodeResult(self.kl[chosen], self.agrees[chosen], self.loss_change[chosen])

    def by_position(self, width: int) -> list[float]:
        """Mean KL divergence of every ``width`` positions in turn."""
        return [part.mean().item() for part in self.kl.split(width, 1)]

    def _quantile(self, share: float) -> float:
        # torch.quantile refuses more than 16 million elements.
        ordered = self.kl.flatten().sort().values
        place = share * (ordered.numel() - 1)
        low = int(place)
        high = min(low + 1, ordered.numel() - 1)
        return (ordered[low] + (place - low) * (ordered[high] - ordered[low])).item()


@dataclass(frozen=True)
class DenseReference:
    """The dense cache's distributions over some texts, computed once and compared with any number of quantized caches.

    Build with :func:`dense_reference`. ``input_ids`` ``[rows, tokens]``, int64; ``log_probs`` ``[rows, positions,
    vocabulary]``, float32, from position ``skip`` on, on the model's device: 1,024 tokens of a vocabulary of 150,000
    hold 400 MB; ``states`` are what every block's layers gave the dense cache, ``block`` the tokens per forward pass.
    """

    input_ids: torch.Tensor
    log_probs: torch.Tensor
    states: list[States]
    block: int
    skip: int

    def compare(
        self,
        model: PreTrainedModel,
        cache: Any,
        history: str = "accumulated",
        block: int | None = None,
        first: int | None = None,
    ) -> PseudoDecodeResult:
        """Run the texts through an empty ``cache`` of the same model.

        Parameters
        ----------
        cache : transformers.Cache
            Empty, for instance a :class:`~kvarn_hf.KVarNCache` whose sinks and residual have the length of a block.
        history : str
            ``"accumulated"``: the cache stores what the model produces with it. ``"static"``: it stores the dense run's
            keys and values, whatever the model produces.
        block, first : int, optional
            Tokens per forward pass, and in the first one, if not as in the dense run.

        Raises
        ------
        ValueError
            If ``history`` is neither, or is static with blocks other than the dense run's.
        """
        if history not in HISTORIES:
            raise ValueError(f"history must be one of {', '.join(HISTORIES)}, got {history!r}")
        if history == "static":
            if (block, first) != (None, None):
                raise ValueError(
                    f"block and first must be the dense run's when history is static, got {block}, {first}"
                )
            store_instead(cache, self.states)
        lengths = block_lengths(self.input_ids.shape[1], block or self.block, first)
        parts, start = [], 0
        for logits in logits_in_blocks(model, self.input_ids, cache, lengths, self.skip):
            end = start + logits.shape[1]
            targets = self.input_ids[:, self.skip + start + 1 : self.skip + end + 1]
            with torch.inference_mode():
                parts.append(_compare(self.log_probs[:, start:end], logits.float().log_softmax(-1), targets))
            start = end
        # Only now is anything copied from the device: a GPU never waits for the host in between.
        return PseudoDecodeResult(*(torch.cat(part, 1).cpu() for part in zip(*parts, strict=True)))


def dense_reference(
    model: PreTrainedModel, input_ids: torch.Tensor, block: int = BLOCK, skip: int = SKIP
) -> DenseReference:
    """Run texts through the dense cache and keep its next-token distributions.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model.
    input_ids : torch.Tensor
        ``[rows, tokens]``, int64, more than ``skip`` tokens of each text.
    block : int
        Tokens per forward pass.
    skip : int
        First position that is measured: with sinks, residual and tiles of 128 tokens, 384 is the first to read a tile.

    Raises
    ------
    ValueError
        If the texts are not longer than ``skip``, or ``block`` is not positive.
    """
    if block < 1:
        raise ValueError(f"block must be at least 1, got {block}")
    if skip < 0:
        raise ValueError(f"skip must not be negative, got {skip}")
    if input_ids.ndim != 2 or input_ids.shape[1] <= skip:
        raise ValueError(
            f"input_ids must have shape [rows, tokens] with more than skip = {skip} tokens, got {list(input_ids.shape)}"
        )
    input_ids = input_ids.to(model.device)
    rows, tokens = input_ids.shape
    cache = RecordingCache(model.config)
    log_probs, start = None, 0
    for logits in logits_in_blocks(model, input_ids, cache, block_lengths(tokens, block), skip):
        if log_probs is None:
            log_probs = logits.new_empty(rows, tokens - skip, logits.shape[2], dtype=torch.float32)
        with torch.inference_mode():
            torch.log_softmax(logits.float(), -1, out=log_probs[:, start : start + logits.shape[1]])
        start += logits.shape[1]
    assert log_probs is not None  # more tokens than skip, so some block gave logits
    return DenseReference(input_ids, log_probs, cache.states, block, skip)


def pseudo_decode(
    model: PreTrainedModel, input_ids: torch.Tensor, make_cache: Callable[[], Any], block: int = BLOCK, skip: int = SKIP
) -> PseudoDecodeResult:
    """Measure KL(dense || quantized) of the next-token distributions in pseudo-decode.

    To measure many caches on the same texts, run the dense one once: :func:`dense_reference`, whose arguments and
    errors are the same. ``make_cache`` is called once, without arguments, and returns an empty cache.

    Notes
    -----
    The protocol of KVarN, arXiv:2606.03458. Before a block runs, a :class:`~kvarn_hf.KVarNCache` with ``sink_length``
    and ``residual_length`` of one block has quantized every tile behind the sinks and before the newest block.

    Examples
    --------
    >>> result = pseudo_decode(model, ids, lambda: KVarNCache(model.config, "kvarn_k4v2_g128"))  # doctest: +SKIP
    >>> print(f"{result.mean:.4f} nats, top-1 {result.top1:.3f}")  # doctest: +SKIP
    """
    return dense_reference(model, input_ids, block, skip).compare(model, make_cache())


def _compare(dense: torch.Tensor, quantized: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """KL, agreement and loss change of ``[rows, positions, vocabulary]`` log-probabilities."""
    kl = (dense.exp() * (dense - quantized)).sum(-1).clamp_min(0)  # rounding may leave a tiny negative sum
    known = targets.shape[1]  # the text's last token has no next one
    loss_change = (dense - quantized)[:, :known].gather(2, targets[..., None]).squeeze(2)
    return kl, dense.argmax(-1) == quantized.argmax(-1), loss_change
