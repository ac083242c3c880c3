"""The suite ``retrieval``: numbers hidden in a long context, asked for through each cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from kvarn_hf.checks import text_of
from kvarn_hf.evaluation.blocks import block_lengths, logits_in_blocks
from kvarn_hf.evaluation.caches import CacheSpec, cache_spec
from kvarn_hf.evaluation.prompts import Question, line_retrieval, needle
from kvarn_hf.evaluation.pseudo_decode import BLOCK, HISTORIES
from kvarn_hf.evaluation.runner import Run

KEY = ("task", "size", "samples", "seed", "cache", "dtype", "history")
DEPTHS = tuple(i / 10 for i in range(11))


@dataclass(frozen=True)
class Encoded:
    """A batch of questions: ``input_ids`` and ``attention_mask`` ``[rows, prompt + answer]``, int64, prompts padded on
    the left and answers on the right; ``answers`` ``[rows, answer]``, int64, -1 behind a row's answer."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    answers: torch.Tensor

    @classmethod
    def of(cls, tokenizer: Any, questions: Sequence[Question], device: torch.device) -> Encoded:
        """As the model's chat template has it, if it has one, with the beginning of the answer in its mouth."""
        prompts = [_prompt_ids(tokenizer, question) for question in questions]
        answers = [tokenizer(question.answer, add_special_tokens=False).input_ids for question in questions]
        prompt, answer = max(map(len, prompts)), max(map(len, answers))
        ids, mask, wanted = [], [], []
        for before, after in zip(prompts, answers, strict=True):
            left, right = prompt - len(before), answer - len(after)
            ids.append([0] * left + before + after + [0] * right)
            mask.append([0] * left + [1] * (len(before) + answer))
            wanted.append(after + [-1] * right)
        return cls(*(torch.tensor(rows, device=device) for rows in (ids, mask, wanted)))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the longest prompt."""
        return self.input_ids.shape[1] - self.answers.shape[1]


def ask(model: Any, encoded: Encoded, cache: Any, history: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether greedy decoding gives each answer, and its log-likelihood: ``[rows]``, bool and float32, in nats.

    All tokens of an answer are given at once, each behind the right ones: they are all most likely exactly if greedy
    decoding produces them.

    Parameters
    ----------
    cache : transformers.Cache
        Empty.
    history : str
        ``"static"``: the prompt is one prefill, so that only the answer reads the quantized history.
        ``"accumulated"``: the prompt runs in blocks too, and later parts of it read earlier ones quantized.
    """
    wanted, prompt = encoded.answers, encoded.prompt_tokens
    # The prompt's last token predicts the first of the answer, whose own last token predicts nothing that is asked.
    ids, mask = encoded.input_ids[:, :-1], encoded.attention_mask[:, :-1]
    before = [prompt - 1] if history == "static" else block_lengths(prompt - 1, BLOCK)
    (logits,) = logits_in_blocks(model, ids, cache, [*before, wanted.shape[1]], prompt - 1, mask)
    with torch.inference_mode():
        known = wanted >= 0
        right = ((logits.argmax(-1) == wanted) | ~known).all(1)
        chosen = logits.float().log_softmax(-1).gather(2, wanted.clamp_min(0)[..., None]).squeeze(2)
        return right, chosen.masked_fill(~known, 0).sum(1)


def measure(
    run: Run,
    caches: Sequence[str],
    lines: Sequence[int] = (20, 50, 100, 200),
    samples: int = 50,
    haystacks: Sequence[Path] = (),
    lengths: Sequence[int] = (),
    histories: Sequence[str] = HISTORIES,
    batch: int = 8,
) -> None:
    """Measure every combination that is not in the results yet; the dense cache is always measured too.

    Parameters
    ----------
    caches : sequence of str
        Names, see :mod:`kvarn_hf.evaluation.caches`.
    lines : sequence of int
        Line retrieval: lines of a record.
    samples : int
        Questions for each number of lines, and for each haystack and length one eleventh of it at every depth.
    haystacks, lengths : sequence of Path, sequence of int
        Texts to hide a needle in, and the tokens of each.
    histories : sequence of str
        See :func:`ask`.
    batch : int
        Prompts in one forward pass.
    """
    results = run.results("retrieval", KEY)
    specs = [spec for spec in map(cache_spec, dict.fromkeys(("dense", *caches))) if spec.reads_in_blocks]
    tasks: list[tuple[str, int, Path | None]] = [("lines", count, None) for count in lines]
    tasks += [(f"needle-{text.stem}", count, text) for text in haystacks for count in lengths]
    with run.steps(len(tasks) * len(specs) * len(histories)) as steps:
        for task, size, haystack in tasks:
            questions: list[Question] = []
            for spec, history in product(specs, histories):
                fields = {"task": task, "size": size, "samples": samples, "seed": run.seed}
                fields |= {"cache": spec.name, "dtype": run.dtype, "history": history}
                # The dense cache reads exactly what it was given, however that came in.
                again = spec.name == "dense" and history != histories[0]
                if again or results.has(**fields):
                    steps.end()
                    continue
                steps.begin(f"{run.name} {task} {size} {spec.name} {history}")
                questions = questions or _questions(run, size, samples, haystack)
                with run.tolerating(spec, steps):
                    record = fields | _answer(run, spec, questions, history, batch)
                    results.add(record, run.environment)
                    found = "{accuracy:.3f} ± {standard_error:.3f}, {log_likelihood:.3f} nats an answer"
                    steps.found(found.format(**record))


def _questions(run: Run, size: int, samples: int, haystack: Path | None) -> list[Question]:
    if haystack is None:
        return line_retrieval(size, samples, run.seed)
    tokenizer = run.loaded[1]
    ids = tokenizer(text_of("text", haystack), add_special_tokens=False).input_ids
    if len(ids) < size:
        raise ValueError(f"tokens must be at most {len(ids)} for the text {haystack.name}, got {size}")
    return needle(tokenizer.decode(ids[:size]), DEPTHS, -(-samples // len(DEPTHS)), run.seed)


def _answer(run: Run, spec: CacheSpec, questions: Sequence[Question], history: str, batch: int) -> dict[str, Any]:
    model, tokenizer = run.loaded
    parts, prompt_tokens = [], 0
    for start in range(0, len(questions), batch):
        encoded = Encoded.of(tokenizer, questions[start : start + batch], model.device)
        prompt_tokens = max(prompt_tokens, encoded.prompt_tokens)
        with spec.opened(model) as cache:
            parts.append(ask(model, encoded, cache, history))
    right, log_likelihood = (torch.cat(part).cpu() for part in zip(*parts, strict=True))
    accuracy, count = right.float().mean().item(), len(questions)
    return {
        "questions": count,
        "prompt_tokens": prompt_tokens,
        "tiles": spec.tiles(prompt_tokens),
        "accuracy": accuracy,
        "standard_error": (accuracy * (1 - accuracy) / count) ** 0.5,
        "log_likelihood": log_likelihood.mean().item(),
        "right": right.int().tolist(),
    }


def _prompt_ids(tokenizer: Any, question: Question) -> list[int]:
    if getattr(tokenizer, "chat_template", None) is None:
        return tokenizer(f"{question.prompt}\n{question.opening}").input_ids
    messages = [{"role": "user", "content": question.prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text + question.opening, add_special_tokens=False).input_ids
