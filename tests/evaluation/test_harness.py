"""The model type ``kvarn`` of lm-eval-harness, on a tiny random model."""

import logging
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvarn_hf import KVarNCache
from kvarn_hf.evaluation.blocks import cache_argument
from tests.models_lettered import CHARACTERS, save_lettered_model

pytest.importorskip("lm_eval", reason="needs the eval extra")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from kvarn_hf.lm_eval import KVarNLM

TASKS = Path(__file__).parents[2] / "eval" / "tasks"
# Tiles of 64 behind 64 sinks: a row of 192 tokens has its first one.
SMALL = {"sink_length": 64, "residual_length": 64, "block": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_lettered_model(tmp_path_factory.mktemp("lettered"))


@pytest.fixture(scope="module")
def lm(folder):
    def build(kv_cache="kvarn_k4v2_g64", **options):
        small = {} if kv_cache == "dense" or "int" in kv_cache else SMALL
        return KVarNLM(str(folder), kv_cache, device="cpu", dtype="float32", **{**small, **options})

    return build


def letters(count, seed=0):
    return "".join(random.Random(seed).choices(CHARACTERS[:27], k=count))


def requests(kind, *arguments):
    return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]


PAIRS = [(letters(n, n), letters(40, n + 1)) for n in (500, 330, 200, 30)]


def likelihoods(lm, pairs=PAIRS):
    return [answer[0] for answer in lm.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)]


def test_the_dense_cache_gives_what_lm_eval_gives(folder, lm):
    plain = HFLM(str(folder), device="cpu", dtype="float32")
    assert likelihoods(lm("dense")) == pytest.approx(likelihoods(plain), abs=1e-3)


def test_scored_tokens_read_quantized_history(lm):
    dense, quantized = likelihoods(lm("dense")), likelihoods(lm("kvarn_k2v2_g64"))
    for changed, exact in zip(quantized[:3], dense[:3], strict=True):
        assert abs(changed - exact) > 1e-3
    assert quantized[3] == pytest.approx(dense[3], abs=1e-3)  # 70 tokens fill no tile


def test_value_bits_change_loglikelihoods(lm):
    few, many = likelihoods(lm("kvarn_k4v2_g64")), likelihoods(lm("kvarn_k4v8_g64"))
    assert all(abs(a - b) > 1e-3 for a, b in zip(few[:3], many[:3], strict=True))


@pytest.mark.parametrize("kv_cache", ["kvarn_k2v2_g64", "published_k2v2_g64", "rtn_k2v2_g64"])
def test_batches_give_what_single_requests_give(lm, kv_cache):
    alone, together = likelihoods(lm(kv_cache)), likelihoods(lm(kv_cache, batch_size=4))
    assert together == pytest.approx(alone, abs=2e-3)


def test_rolling_likelihoods_read_quantized_history(lm):
    text = requests("loglikelihood_rolling", (letters(900),))
    exact = lm("dense").loglikelihood_rolling(text, disable_tqdm=True)
    quantized = lm("kvarn_k2v2_g64").loglikelihood_rolling(text, disable_tqdm=True)
    assert abs(exact[0] - quantized[0]) > 0.1


def test_a_block_is_scored_as_the_cache_reads_it(folder, lm):
    adapter = lm("kvarn_k2v2_g64")
    ids = torch.tensor([adapter.tok_encode(letters(400))])
    model, cache = adapter.model, KVarNCache(adapter.model.config, adapter.spec.kvarn)
    with torch.inference_mode():
        parts = [model(part, use_cache=True, **{cache_argument(model): cache}).logits for part in ids.split(64, 1)]
    assert cache.report()["tiles"] == adapter.spec.kvarn.packed_tiles(400) > 0
    torch.testing.assert_close(adapter._model_call(ids), torch.cat(parts, 1), rtol=0, atol=0)


PROMPTS = [(letters(n, n), {"until": ["\n\n"], "max_gen_toks": 24}) for n in (400, 260, 60)]


def generated(lm, prompts=PROMPTS):
    return lm.generate_until(requests("generate_until", *prompts), disable_tqdm=True)


@pytest.mark.parametrize("kv_cache", ["dense", "kvarn_k4v4_g64"])
def test_generation_runs_through_the_cache(folder, lm, kv_cache):
    adapter = lm(kv_cache)
    texts = generated(adapter)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for (prompt, _), text in zip(PROMPTS, texts, strict=True):
        ids = torch.tensor([adapter.tok_encode(prompt)])
        cache = DynamicCache() if kv_cache == "dense" else KVarNCache(model.config, adapter.spec.kvarn)
        options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 1, cache_argument(model): cache}
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert text == adapter.tok_decode(out[0, ids.shape[1] :]).split("\n\n")[0]


def test_generation_in_batches_gives_what_single_prompts_give(lm):
    prompts = [(letters(400, seed), PROMPTS[0][1]) for seed in range(3)]
    assert generated(lm("kvarn_k2v2_g64", batch_size=3), prompts) == generated(lm("kvarn_k2v2_g64"), prompts)


def test_padding_in_a_batch_shapes_no_other_row(lm):
    # The middle row's own tiles begin elsewhere when it is padded, so its codes may differ a little.
    together, alone = generated(lm("kvarn_k4v4_g64", batch_size=3)), generated(lm("kvarn_k4v4_g64"))
    assert together[0] == alone[0] and together[2] == alone[2]
    assert together[1][:8] == alone[1][:8]


def test_generation_ends_at_a_stop_string(lm, monkeypatch):
    adapter = lm("dense", batch_size=3)
    whole = generated(adapter, [(prompt, {"until": [], "max_gen_toks": 64}) for prompt, _ in PROMPTS])
    stops = [text[20:23] for text in whole[:2]]
    lengths, model = [], adapter.model
    monkeypatch.setattr(
        model, "generate", lambda generate=model.generate, **kwargs: lengths.append(generate(**kwargs)) or lengths[-1]
    )
    found = generated(adapter, [(prompt, {"until": stops, "max_gen_toks": 64}) for prompt, _ in PROMPTS[:2]])
    for text, full in zip(found, whole, strict=False):
        assert text == full[: min(full.index(stop) for stop in stops if stop in full)]
    assert lengths[0].shape[1] - len(PROMPTS[0][0]) <= 32  # neither row ran to its 64 tokens


def test_beams_run_through_the_cache(lm):
    prompts = [(prompt, {"until": ["zz"], "max_gen_toks": 12, "num_beams": 2}) for prompt, _ in PROMPTS[:2]]
    dense, quantized = generated(lm("dense"), prompts), generated(lm("kvarn_k8v8_g64"), prompts)
    assert quantized == dense


def test_it_says_how_many_tiles_were_quantized(lm, caplog):
    caplog.set_level(logging.DEBUG, "lm_eval.kvarn")
    adapter = lm(batch_size=2)
    likelihoods(adapter)
    # Held before the last block: 512 of 539 tokens, 320 of 369, 192 of 239, 64 of 69; sinks and newest are 64 each.
    assert adapter.get_model_info()["requests_by_tiles"] == {"0": 1, "1": 1, "3": 1, "6": 1}
    assert adapter.get_model_info()["kv_cache"] == "kvarn_k4v2_g64"
    assert "4 requests quantized 0 to 6 tiles each, 2.5 on average" in caplog.text
    assert "512 tokens, 6 tiles quantized" in caplog.text
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "1 of 4 requests quantized no tile" in warnings[0]
    assert "once 192 tokens are held (sinks 64, tile 64, newest 64), and the shortest of them held 64" in warnings[0]


def test_it_says_how_many_tiles_generation_quantized(lm, caplog):
    adapter = lm(batch_size=3)
    texts = generated(adapter)
    lengths = [len(prompt) + len(text) for (prompt, _), text in zip(PROMPTS, texts, strict=True)]
    expected = sorted((length - 128) // 64 if length >= 192 else 0 for length in lengths)
    assert sorted(adapter.tiles.elements()) == expected and expected[0] == 0 < expected[1]
    assert "1 of 3 requests quantized no tile" in caplog.text


def test_other_caches_have_no_tiles_to_warn_of(lm, caplog):
    likelihoods(lm("dense"))
    assert "tile" not in caplog.text


def test_a_chat_template_and_a_task_of_the_folder(lm):
    manager = TaskManager(include_path=str(TASKS), metadata={"lines": [6], "samples": 2})
    options = {"task_manager": manager, "apply_chat_template": True, "limit": 2, "bootstrap_iters": 0}
    found = simple_evaluate(lm("kvarn_k4v2_g64"), tasks=["kvarn_line_retrieval"], log_samples=True, **options)
    assert found["results"]["kvarn_line_retrieval"]["sample_len"] == 2
    prompt = found["samples"]["kvarn_line_retrieval"][0]["arguments"][0][0]
    assert prompt.startswith("<user>") and "\n<assistant>line " in prompt
    assert found["config"]["kv_cache"] == "kvarn_k4v2_g64"
    assert min(map(int, found["config"]["requests_by_tiles"])) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache": "kvarn_k5v2_g64"}, "cache must be one of dense, .*got 'kvarn_k5v2_g64'"),
        ({"block": 0}, "block must be a positive integer, got 0"),
        ({"kv_cache": "quanto-int4", "sink_length": 4}, "sink_length cannot be set: cache 'quanto-int4'"),
    ],
)
def test_bad_arguments_are_named(folder, options, message):
    with pytest.raises(ValueError, match=message):
        KVarNLM(str(folder), device="cpu", **options)


@pytest.mark.slow
def test_the_command_line(folder, tmp_path):
    command = [sys.executable, "-m", "kvarn_hf.lm_eval", "--model", "kvarn", "--device", "cpu", "--limit", "1"]
    command += ["--model_args", f"pretrained={folder},kv_cache=kvarn_k4v2_g128,dtype=float32"]
    command += ["--include_path", str(TASKS), "--tasks", "kvarn_line_retrieval", "--metadata", '{"lines": [20]}']
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "kvarn_line_retrieval" in done.stdout
    assert "1 requests quantized" in done.stderr
