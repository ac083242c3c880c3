"""Questions about long texts, and whether an answer is right."""

import pytest
import torch

from kvarn_hf.evaluation import retrieval
from kvarn_hf.evaluation.blocks import cache_argument
from kvarn_hf.evaluation.caches import cache_spec
from kvarn_hf.evaluation.prompts import line_retrieval, needle


def test_questions_hold_their_answers():
    for question in line_retrieval(30, 5, seed=1):
        name = question.opening.split()[1].removesuffix(":")
        assert question.prompt.count(f"line {name}: REGISTER_CONTENT is <{question.answer}>") == 1
        assert question.prompt.count("REGISTER_CONTENT is <") == 30 and len(question.answer) == 5
        assert question.prompt.endswith(f"line {name}?")
    assert line_retrieval(30, 2, seed=1) == line_retrieval(30, 5, seed=1)[:2] != line_retrieval(30, 2, seed=2)
    haystack = "a line\n" * 10
    for depth, question in zip((0.0, 0.5, 1.0), needle(haystack, (0, 0.5, 1), 1, seed=0), strict=True):
        sentence = f"{question.opening}{question.answer}>.\n"
        assert question.prompt.index(sentence) == round(depth * 10) * len("a line\n")


@pytest.mark.parametrize("history", ["static", "accumulated"])
def test_an_answer_is_right_exactly_if_greedy_decoding_gives_it(loaded, history):
    model, _ = loaded
    spec = cache_spec("kvarn_k2v2_g128")
    for length in (500, 420, 300):
        ids = torch.randint(2, 70, (1, length), generator=torch.Generator().manual_seed(length))
        cache = spec.make(model)
        with torch.inference_mode():
            for part in ids[:, :-1].split(length if history == "static" else 128, 1):
                model(part, **{cache_argument(model): cache})
        options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 1}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **{cache_argument(model): cache}, **options)
        for change, expected in (([0] * 5, True), ([0, 0, 0, 0, 1], False), ([1, 0, 0, 0, 0], False)):
            answers = (out[:, length:] + torch.tensor(change)) % 72
            whole = torch.cat([ids, answers], 1)
            encoded = retrieval.Encoded(whole, torch.ones_like(whole), answers)
            right, log_likelihood = retrieval.ask(model, encoded, spec.make(model), history)
            assert right.tolist() == [expected] and log_likelihood.item() < 0


def test_padded_questions_are_answered_as_alone(loaded):
    model, tokenizer = loaded
    questions = line_retrieval(3, 2, seed=0) + line_retrieval(5, 2, seed=0)
    together = retrieval.Encoded.of(tokenizer, questions, model.device)
    assert (together.attention_mask == 0).any()
    _, batched = retrieval.ask(model, together, cache_spec("dense").make(model), "accumulated")
    for i, question in enumerate(questions):
        encoded = retrieval.Encoded.of(tokenizer, [question], model.device)
        _, alone = retrieval.ask(model, encoded, cache_spec("dense").make(model), "static")
        assert batched[i].item() == pytest.approx(alone.item(), abs=1e-2)
