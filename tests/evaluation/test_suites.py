"""``kvarn eval``: what the suites measure, that they go on where they stopped, and what they write."""

import json
import types

import pytest
import torch
from typer.testing import CliRunner

from kvarn_hf import KVarNCache
from kvarn_hf.cli import app
from kvarn_hf.evaluation.caches import cache_spec
from kvarn_hf.evaluation.pseudo_decode import pseudo_decode
from kvarn_hf.evaluation.report import over_texts
from kvarn_hf.evaluation.results import ResultFile
from kvarn_hf.evaluation.runner import first_tokens
from kvarn_hf.evaluation.suites import evaluate
from tests.evaluation.common import CACHES, records


def test_pseudo_decode_writes_what_is_measured(folder, texts, loaded, tmp_path):
    options = {"caches": CACHES, "texts": texts, "lengths": [700], "batch": 2, "device": "cpu", "out": tmp_path}
    written = evaluate("pseudo-decode", [str(folder)], **options)
    found = records(tmp_path, "pseudo_decode")
    assert [(r["text"], r["cache"]) for r in found] == [(t, c) for c in CACHES for t in ("first", "second")]
    model, tokenizer = loaded
    ids = tokenizer(texts[1].read_text(), return_tensors="pt").input_ids[:, :700]
    alone = pseudo_decode(model, ids, lambda: KVarNCache(model.config, CACHES[0]))
    assert found[1]["mean"] == pytest.approx(alone.mean, rel=1e-3) and alone.mean > 1e-4
    assert found[1]["perplexity_ratio"] == pytest.approx(alone.perplexity_ratio, rel=1e-3)
    assert found[1]["bits"] == cache_spec(CACHES[0]).bits_per_element(32)
    assert len(found[1]["by_position"]) == 2
    content = json.loads((tmp_path / "pseudo_decode_lettered.json").read_text())
    assert content["environments"][0].keys() >= {"torch", "transformers", "commit", "device", "seed"}
    table = (tmp_path / "pseudo_decode.md").read_text()
    assert "## lettered, 700 tokens, float32, accumulated" in table
    assert (
        f"| `{CACHES[0]}` | {found[0]['bits']:.4g} | 2 | {over_texts([found[0]['mean'], found[1]['mean']])} |" in table
    )
    assert tmp_path / "pseudo_decode.md" in written


def test_stretches_follow_one_another_and_count_together(folder, texts, loaded, tmp_path):
    tokenizer = loaded[1]
    ids = tokenizer(texts[0].read_text(), return_tensors="pt").input_ids[0]
    rows = first_tokens(tokenizer, texts, 450, stretches=2)
    assert rows.shape == (4, 450)
    assert torch.equal(rows[0], ids[:450]) and torch.equal(rows[1], ids[450:900])

    options = {"caches": CACHES[:1], "lengths": [450], "device": "cpu", "out": tmp_path}
    evaluate("pseudo-decode", [str(folder)], texts=texts, stretches=2, batch=2, **options)
    found = records(tmp_path, "pseudo_decode")
    assert [(r["text"], r["stretches"]) for r in found] == [("first", 2), ("second", 2)]
    model = loaded[0]
    alone = pseudo_decode(model, rows[2:], lambda: KVarNCache(model.config, CACHES[0]))
    assert found[1]["mean"] == pytest.approx(alone.mean, rel=1e-3)
    assert found[1]["p999"] == pytest.approx(alone.p999, rel=1e-2)
    evaluate("pseudo-decode", [str(folder)], texts=texts[:1], **options)
    assert len(records(tmp_path, "pseudo_decode")) == 3  # one stretch is another measurement than two
    table = (tmp_path / "pseudo_decode.md").read_text()
    assert "## lettered, 2 times 450 tokens" in table and "## lettered, 450 tokens" in table


@pytest.mark.parametrize(("before", "after"), [([7], []), ([], []), ([7], [8]), ([], [8])])
def test_every_stretch_begins_as_a_text_does(texts, before, after):
    def tokenizer(text, add_special_tokens=True):
        ids = [100 + i for i in range(len(text))]
        return types.SimpleNamespace(input_ids=before + ids + after if add_special_tokens else ids)

    rows = first_tokens(tokenizer, texts[:1], 4 + len(before), stretches=3)
    assert rows.tolist() == [[*before, 100 + i, 101 + i, 102 + i, 103 + i] for i in (0, 4, 8)]


def test_a_second_run_measures_only_what_is_missing(folder, texts, tmp_path, monkeypatch):
    options = {"lengths": [600], "device": "cpu", "out": tmp_path}
    evaluate("pseudo-decode", [str(folder)], caches=CACHES[:1], texts=texts[:1], **options)
    before = records(tmp_path, "pseudo_decode")
    evaluate("pseudo-decode", [str(folder)], caches=CACHES, texts=texts, **options)
    after = records(tmp_path, "pseudo_decode")
    assert after[0] == before[0] and len(after) == 4
    monkeypatch.setattr("kvarn_hf.evaluation.runner.load_model", lambda *a: pytest.fail("nothing is left to measure"))
    evaluate("pseudo-decode", [str(folder)], caches=CACHES, texts=texts, **options)
    assert records(tmp_path, "pseudo_decode") == after


def test_accumulation_has_both_histories_by_position(folder, texts, tmp_path):
    evaluate(
        "accumulation", [str(folder)], caches=CACHES[:1], texts=texts[:1], lengths=[900], device="cpu", out=tmp_path
    )
    found = {r["history"]: r for r in records(tmp_path, "accumulation")}
    assert found.keys() == {"accumulated", "static"}
    assert found["accumulated"]["mean"] != found["static"]["mean"]
    assert len(found["static"]["by_position"]) == 3
    assert (tmp_path / "accumulation_lettered.png").stat().st_size > 1000


def test_the_tensor_suite_writes_layers_and_a_figure(folder, texts, tmp_path):
    evaluate("tensor", [str(folder)], caches=CACHES, texts=texts, lengths=[640], batch=2, device="cpu", out=tmp_path)
    found = records(tmp_path, "tensor")
    assert len(found) == 2 * 2 * 2 and {r["history"] for r in found} == {"static", "accumulated"}
    assert all(r["layers"] == [0, 1] and len(r["attention_error"]) == 2 for r in found)
    assert "| `kvarn_k2v2_g128` |" in (tmp_path / "tensor.md").read_text()
    assert (tmp_path / "tensor_lettered.png").stat().st_size > 1000


def test_the_retrieval_suite(folder, texts, tmp_path):
    options = {"texts": texts[:1], "lengths": [500], "lines": [4, 12], "samples": 11, "batch": 11}
    evaluate("retrieval", [str(folder)], caches=CACHES[:1], device="cpu", out=tmp_path, **options)
    found = records(tmp_path, "retrieval")
    names = [(r["task"], r["size"], r["cache"], r["history"]) for r in found]
    assert len(names) == len(set(names)) == 3 * 3  # dense once, and the other with both histories
    needles = [r for r in found if r["task"] == "needle-first"]
    assert all(r["questions"] == 11 and len(r["right"]) == 11 for r in needles)
    exact, quantized = (r["log_likelihood"] for r in needles[:2])
    assert exact != quantized and needles[1]["tiles"] >= 1
    assert "| `dense` |" in (tmp_path / "retrieval.md").read_text()
    assert (tmp_path / "retrieval_lettered.png").exists()


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    file = ResultFile(tmp_path / "x.json", "m", ["a"])
    file.add({"a": 1, "b": 2}, {"torch": "1"})
    monkeypatch.setattr("os.replace", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        file.add({"a": 2, "b": 3}, {"torch": "1"})
    monkeypatch.undo()
    again = ResultFile(tmp_path / "x.json", "m", ["a"])
    assert again.records == [{"a": 1, "b": 2, "environment": 0}]
    assert again.has(a=1) and not again.has(a=2)
    again.add({"a": 2, "b": 3}, {"torch": "2"})
    assert [r["environment"] for r in ResultFile(tmp_path / "x.json", "m", ["a"]).records] == [0, 1]


def test_a_competitor_that_fails_does_not_end_the_run(folder, texts, tmp_path, monkeypatch):
    from kvarn_hf.evaluation import caches

    broken = caches.CacheSpec("broken", lambda model: 1 / 0, lambda head_dim: 4.0, package="torch")
    monkeypatch.setitem(caches._OTHERS, "broken", broken)
    options = {"caches": ["broken", CACHES[0]], "texts": texts[:1], "lengths": [600], "device": "cpu", "out": tmp_path}
    evaluate("pseudo-decode", [str(folder)], **options)
    assert [r["cache"] for r in records(tmp_path, "pseudo_decode")] == CACHES[:1]


def test_the_command(folder, texts, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    command = [
        "eval",
        "--suite",
        "pseudo-decode",
        "--model",
        str(folder),
        "--cache",
        CACHES[0],
        "--text",
        str(texts[0]),
    ]
    done = CliRunner().invoke(app, [*command, "--tokens", "512", "--device", "cpu", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert f"lettered 512 {CACHES[0]} accumulated: mean KL" in done.output
    assert str(tmp_path / "pseudo_decode.md") in done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--suite", "speed"],
            "suite must be one of pseudo-decode, accumulation, tensor, retrieval, tasks, got 'speed'",
        ),
        (["--suite", "tensor"], "text must be given for the suite tensor"),
        (["--suite", "tasks"], "task must be given for the suite tasks"),
        (["--suite", "tensor", "--cache", "int4"], "cache must be one of dense"),
        (["--suite", "pseudo-decode", "--text", "TEXT", "--tokens", "2000"], "tokens must be at most 1000"),
        (
            ["--suite", "pseudo-decode", "--text", "TEXT", "--tokens", "600", "--stretches", "2"],
            "tokens must be at most 500 for 2 stretches",
        ),
        (
            ["--suite", "pseudo-decode", "--text", "TEXT", "--stretches", "0"],
            "stretches must be an integer >= 1, got 0",
        ),
        (["--suite", "tensor", "--text", "TEXT", "--tokens", "384"], "tokens must be more than 384"),
        (["--suite", "tensor", "--text", "TEXT", "--history", "old"], "history must be one of accumulated, static"),
        (["--suite", "tensor", "--text", "TEXT", "--batch", "0"], "batch must be an integer >= 1, got 0"),
        (["--suite", "tensor", "--text", "TEXT", "--tokens", "0"], "tokens must be an integer >= 1, got 0"),
        (
            ["--suite", "pseudo-decode", "--text", "TEXT", "--tokens", "384"],
            "tokens must be an integer >= 385, got 384",
        ),
        (["--suite", "retrieval", "--lines", "99999"], "lines must be an integer from 1 to 5360, got 99999"),
        (["--suite", "retrieval", "--lines", "0"], "lines must be an integer from 1 to 5360, got 0"),
        (["--suite", "tasks", "--task", "x", "--data", "/nowhere"], "data must be a folder, got '/nowhere'"),
        (["--suite", "tasks", "--task", "x", "--limit", "0"], "limit must be an integer >= 1, got 0"),
        (["--suite", "tensor", "--text", "BINARY"], "text must be a UTF-8 text file, got"),
        (["--suite", "tensor", "--text", "EMPTY"], "text must be a file with some text, got"),
    ],
)
def test_bad_options_are_named(folder, texts, tmp_path, options, message):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").write_text("\n")
    files = {"TEXT": texts[0], "BINARY": tmp_path / "binary", "EMPTY": tmp_path / "empty"}
    options = [str(files.get(option, option)) for option in options]
    done = CliRunner().invoke(
        app, ["eval", "--model", str(folder), "--device", "cpu", "--out", str(tmp_path), *options]
    )
    assert done.exit_code == 2
    assert message in done.output
