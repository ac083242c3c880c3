"""lm-eval-harness through a quantized cache: the model type ``kvarn``.

    python -m kvarn_hf.lm_eval --model kvarn --model_args pretrained=NAME,kv_cache=kvarn_k4v2_g128 --tasks gsm8k

takes everything that ``lm_eval`` takes, and ``accelerate launch -m kvarn_hf.lm_eval ...`` runs it on several devices.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from kvarn_hf.evaluation.blocks import block_lengths, cache_argument, logits_in_blocks
from kvarn_hf.evaluation.caches import cache_spec
from kvarn_hf.evaluation.pseudo_decode import BLOCK

_LOGGER = logging.getLogger("lm_eval.kvarn")  # below the logger that lm-eval shows


@register_model("kvarn")
class KVarNLM(HFLM):
    """A Transformers model whose requests run through a quantized cache.

    Generation tasks generate with the cache. Log-likelihoods and perplexities are computed block by block: in a single
    forward pass every token would attend to exact keys, and nothing would be measured. What a token reads depends on
    its own row alone, so batches give what single requests give.

    Parameters
    ----------
    pretrained : str or transformers.PreTrainedModel
        As in ``HFLM``.
    kv_cache : str
        A name of :mod:`kvarn_hf.evaluation.caches`: ``kvarn_k4v2_g128``, ``published_k2v2_g128``, ``quanto-int4``,
        ``dense``, ...
    block : int
        Tokens per forward pass of log-likelihood requests. Tiles are packed between passes, so a token reads them
        quantized from at most this many tokens after the point at which ``generate()`` would.
    sink_length, residual_length : int, optional
        Replace those of the preset.
    **kwargs
        All other arguments of ``HFLM``, and of ``from_pretrained``.

    Raises
    ------
    ValueError
        If there is no such cache, ``block`` is not positive, or the model is an encoder-decoder.
    """

    def __init__(
        self,
        pretrained: Any,
        kv_cache: str = "kvarn_k4v2_g128",
        block: int = BLOCK,
        sink_length: int | None = None,
        residual_length: int | None = None,
        **kwargs: Any,
    ) -> None:
        if type(block) is not int or block < 1:
            raise ValueError(f"block must be a positive integer, got {block!r}")
        lengths = {"sink_length": sink_length, "residual_length": residual_length}
        self.spec = cache_spec(kv_cache, **{name: value for name, value in lengths.items() if value is not None})
        self.block = block
        # How many requests quantized so many tiles.
        self.tiles: Counter[int] = Counter()
        self._generated: list[int] = []
        super().__init__(pretrained=pretrained, **kwargs)
        if self.backend != "causal":
            raise ValueError(f"backend must be causal, got {self.backend!r}: a KV cache of a decoder is measured")

    def _model_call(self, inps: torch.Tensor, attn_mask: Any = None, labels: Any = None) -> torch.Tensor:
        """Logits ``[batch, tokens, vocabulary]`` of ``inps``, block by block through a fresh cache.

        Rows are padded on the right, without a mask: no real token reads what a pad shaped, as every tile that it reads
        ends before it.
        """
        tokens = inps.shape[1]
        whole = self.spec.reads_in_blocks
        lengths = block_lengths(tokens, self.block) if whole else block_lengths(tokens, 1, first=self.block)
        with self._autocast(), self.spec.opened(self.model) as cache:
            return torch.cat(list(logits_in_blocks(self.model, inps, cache, lengths)), 1)

    def _loglikelihood_tokens(self, requests: list[Any], *args: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        answers = super()._loglikelihood_tokens(requests, *args, **kwargs)
        lengths = (min(len(context) + len(continuation) - 1, self.max_length) for _, context, continuation in requests)
        # What the last token reads was packed before its block began.
        self._report((length - 1) // self.block * self.block for length in lengths)
        return answers

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **kwargs: Any) -> torch.Tensor:
        if not kwargs.get("temperature") and not kwargs.get("do_sample"):
            kwargs.pop("temperature", None)
            kwargs["do_sample"] = False
        with self._autocast(), self.spec.opened(self.model) as cache:
            out = self.model.generate(
                input_ids=context,
                max_length=max_length,
                stopping_criteria=[_StopStrings(self.tokenizer, stop, context.shape)],
                pad_token_id=self.tokenizer.pad_token_id,
                use_cache=True,
                **{cache_argument(self.model): cache},
                **kwargs,
            )
        prompt = kwargs["attention_mask"].sum(1) if "attention_mask" in kwargs else context.shape[1]
        ended = (out[:, context.shape[1] :] == self.eot_token_id).cumsum(1) > 0
        # The newest token is not in the cache.
        self._generated += (prompt + (~ended)[:, :-1].sum(1)).tolist()
        return out

    def _autocast(self) -> torch.autocast:
        chosen = self.mixed_precision_dtype
        return torch.autocast(self.device.type, chosen, enabled=chosen is not None)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """As in ``HFLM``, through the cache."""
        self._generated = []
        texts = super().generate_until(requests, disable_tqdm)
        self._report(self._generated)
        return texts

    def get_model_info(self) -> dict[str, Any]:
        """As in ``HFLM``, with the cache, and how many requests quantized so many tiles."""
        tiles = {str(count): self.tiles[count] for count in sorted(self.tiles)}
        return super().get_model_info() | {"kv_cache": self.spec.name, "requests_by_tiles": tiles}

    def _report(self, lengths: Iterable[int]) -> None:
        """Say how many tiles requests quantized that held so many tokens."""
        lengths, config, name = list(lengths), self.spec.kvarn, self.spec.name
        if config is None or not lengths:
            return
        tiles = [config.packed_tiles(length) for length in lengths]
        self.tiles.update(tiles)
        for length, count in zip(lengths, tiles, strict=True):
            _LOGGER.debug("%s: %d tokens, %d tiles quantized", name, length, count)
        figures = len(tiles), min(tiles), max(tiles), sum(tiles) / len(tiles)
        _LOGGER.info("%s: %d requests quantized %d to %d tiles each, %.1f on average", name, *figures)
        if not all(tiles):
            sizes = config.sink_length, config.tile_size, config.residual_length
            _LOGGER.warning(
                "%s: %d of %d requests quantized no tile, so their results are the dense cache's: a tile is packed "
                "once %d tokens are held (sinks %d, tile %d, newest %d), and the shortest of them held %d",
                *(name, tiles.count(0), len(tiles), sum(sizes), *sizes, min(lengths)),
            )


class _StopStrings:
    """Ends each row once its new text holds a stop string; lm-eval cuts the text there.

    lm-eval's own criterion decodes every row once for each string at every step, which costs more than the step itself
    in large batches, and ends a batch only when one and the same string has come up in all of its rows.
    """

    INTERVAL = 8  # steps from one look at the text to the next

    def __init__(self, tokenizer: Any, strings: Sequence[str], prompt: torch.Size) -> None:
        self.tokenizer, self.strings, self.start = tokenizer, [string for string in strings if string], prompt[1]
        self.done = torch.zeros(prompt[0], dtype=torch.bool)
        # A token that adds no character is rare: this many tokens hold the longest string and all that is new.
        self.window = max(map(len, self.strings), default=0) + self.INTERVAL

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.shape[0] != self.done.shape[0]:  # beams change places, and generate() ends them itself
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        new = input_ids.shape[1] - self.start
        if self.strings and new % self.INTERVAL == 0:
            texts = self.tokenizer.batch_decode(input_ids[:, self.start :][:, -self.window :])
            self.done |= torch.tensor([any(string in text for string in self.strings) for text in texts])
        return self.done.to(input_ids.device)


def main() -> None:
    """``lm_eval``'s own command line, with the model type ``kvarn``."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
