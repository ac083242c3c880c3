"""Figures of memory and speed show the data they are given."""

import torch

from kvarn_hf.bench.results import save
from kvarn_hf.plotting import memory
from tests.plotting.common import heights, labels

GIB = 2**30


def test_cache_bytes_stacks_parts():
    fig = memory.cache_bytes({"dense": {"dense": 40 * 2**20}, "packed": {"tail": 4 * 2**20, "tiles": 6 * 2**20}})
    (ax,) = fig.axes
    drawn = [(bar.get_x(), bar.get_width()) for container in ax.containers for bar in container]
    assert drawn == [(0, 40), (0, 4), (4, 6)]
    assert {text.get_text().strip() for text in ax.texts} == {"40.0 MiB", "10.0 MiB"}


def test_bytes_by_context_with_limits():
    fig = memory.bytes_by_context([1024, 2048], {"dense": [GIB, 2 * GIB]}, {"a GPU": 3 * GIB})
    (ax,) = fig.axes
    assert list(ax.lines[0].get_ydata()) == [1.0, 2.0]
    assert list(ax.lines[1].get_ydata()) == [3.0, 3.0]
    assert any(text.get_text() == "a GPU" for text in ax.texts)
    assert all(labels(fig))


def test_tokens_that_fit():
    (ax,) = memory.tokens_that_fit({"24 GB": {"dense": 1000, "packed": 4000}}).axes
    assert [heights(container) for container in ax.containers] == [[1000], [4000]]


def test_decode_steps_leave_failures_out():
    rows = [
        {"cache": cache, "batch": batch, "context": context, "step_ms": None if cache == "broken" else context * batch}
        for cache in ("dynamic", "broken")
        for batch in (1, 8)
        for context in (2048, 1024)
    ]
    fig = memory.decode_steps(rows)
    assert [ax.get_title() for ax in fig.axes] == ["batch 1", "batch 8"]
    for ax, batch in zip(fig.axes, (1, 8), strict=True):
        (line,) = ax.lines
        assert list(line.get_xdata()) == [1024, 2048]
        assert list(line.get_ydata()) == [1024 * batch, 2048 * batch]
        assert ax.get_yscale() == "log"


def test_the_legend_of_decode_steps_names_every_cache():
    rows = [
        {"cache": cache, "batch": batch, "context": 1024, "step_ms": 5.0}
        for cache, batch in (("dynamic", 1), ("static", 1), ("dynamic", 8), ("kvarn", 8))
    ]
    last = memory.decode_steps(rows).axes[-1]
    assert [text.get_text() for text in last.get_legend().get_texts()] == ["dynamic", "static", "kvarn"]


def test_attention_times_use_the_best_dense_backend():
    row = {"batch": 8, "context": 32768, "heads": 8, "groups": 4, "head_dim": 128, "preset": "kvarn_k4v2_g128"}
    row |= {"packed": 75.0, "dense": {"flash": 250.0, "cudnn": 300.0}, "best_dense": "flash"}
    fig = memory.attention_times([row, row | {"preset": "kvarn_k2v2_g128", "packed": 55.0}])
    assert [bar.get_width() for container in fig.axes[0].containers for bar in container] == [250.0, 75.0, 55.0]
    assert fig.axes[0].get_xlabel() == "microseconds"


def test_rows_of_committed_results(tmp_path):
    assert memory.read_rows(tmp_path, "generate") == ([], "")
    (tmp_path / "bench_generate_a.json").write_text('[{"step_ms": 1}]')
    save([{"step_ms": 2}], "generate_b", tmp_path)
    (tmp_path / "bench_attention.json").write_text('[{"packed": 3}]')
    rows, made = memory.read_rows(tmp_path, "generate")
    assert rows == [{"step_ms": 1}, {"step_ms": 2}]
    assert f"torch {torch.__version__}" in made
    assert memory.read_rows(tmp_path, "attention") == ([{"packed": 3}], "")
