"""Figures show the data they are given, in ways that do not need colour, and need matplotlib only when made."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvarn_hf.bench.results import save
from kvarn_hf.method.errors import token_errors
from kvarn_hf.plotting import errors, memory, tiles
from kvarn_hf.plotting.style import figure, series_style, series_styles

ROOT = Path(__file__).parents[2]
GIB = 2**30


def labels(fig):
    return [text for ax in fig.axes for text in (ax.get_xlabel(), ax.get_ylabel())]


def heights(container):
    return [bar.get_height() for bar in container]


def test_style_tells_series_apart_without_colour():
    styles = [series_style(i) for i in range(10)]
    for cue in ("linestyle", "marker", "hatch", "color"):
        assert len({getattr(style, cue) for style in styles}) == 10
    assert series_style(10) == series_style(0)

    def lightness(color):
        red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
        return 0.299 * red + 0.587 * green + 0.114 * blue

    # Those used most: grey levels that print apart.
    for one, other in itertools.pairwise(lightness(style.color) for style in styles[:4]):
        assert abs(one - other) > 30


def test_methods_look_the_same_in_every_figure():
    rtn, kvarn = series_styles(["rtn", "kvarn"])
    assert series_styles(["kvarn", "something", "rtn", "other"]) == [kvarn, series_style(1), rtn, series_style(3)]


def test_matplotlib_is_imported_when_a_figure_is_made():
    code = f"""
import sys
sys.path[:0] = {[str(ROOT), str(ROOT / "kernels")]!r}
import kvarn_hf.plotting.errors, kvarn_hf.plotting.memory, kvarn_hf.plotting.tiles
assert not any(name.split(".")[0] == "matplotlib" for name in sys.modules)
sys.modules["matplotlib"] = None
try:
    kvarn_hf.plotting.memory.cache_bytes({{"a": {{"b": 1}}}})
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == 'Figures need matplotlib: pip install "kvarn-hf[notebooks]".'


def test_a_figure_leaves_nothing_open():
    import matplotlib.pyplot as plt

    figure()
    assert plt.get_fignums() == []


def test_stages_show_every_matrix():
    real, codes = torch.randn(128, 64), torch.randint(0, 16, (128, 64))
    fig = tiles.stages([("one", real), ("two", codes)])
    heat = [ax.images[0].get_array() for ax in fig.axes if ax.images and ax.get_xlabel() == "token of the tile"]
    assert torch.equal(torch.tensor(heat[0].data), real.T)
    assert torch.equal(torch.tensor(heat[1].data), codes.T)
    histograms = [ax for ax in fig.axes if ax.containers]
    for ax in histograms:
        assert sum(heights(ax.containers[0])) == real.numel()
    assert histograms[1].get_xlabel() == "code"
    assert heights(histograms[1].containers[0]) == torch.bincount(codes.flatten(), minlength=16).tolist()


def test_spreads_are_relative_to_the_median():
    tile = torch.randn(128, 64) * torch.linspace(1, 5, 64)
    channels, tokens = tiles.spreads({"a tile": tile}).axes
    for ax, dim in ((channels, 0), (tokens, 1)):
        drawn = torch.tensor(ax.lines[0].get_ydata())
        assert torch.allclose(drawn * tile.std(dim, correction=0).median(), tile.std(dim, correction=0))
        assert ax.get_yscale() == "log"
    assert channels.get_xlabel() == "channel of the tile"
    assert tokens.get_xlabel() == "token of the tile"


def test_outlier_profile_is_absolute():
    tile = torch.randn(128, 64) * torch.linspace(1, 5, 64)
    (ax,) = tiles.outlier_profile({"a tile": tile, "twice": 2 * tile}).axes
    one, twice = (torch.tensor(line.get_ydata()) for line in ax.lines)
    assert torch.allclose(one, tile.std(0, correction=0))
    assert torch.allclose(twice, 2 * one)


def test_glance_has_a_panel_for_every_stage_and_a_box_for_every_region():
    panels = [("a", "first", torch.randn(128, 64)), ("b", "second", torch.randint(0, 16, (128, 64)))]
    fig = tiles.glance(panels, (128, 3, 200), 128)
    assert [(ax.get_title(), ax.get_xlabel()) for ax in fig.axes if ax.images] == [("a", "first"), ("b", "second")]
    strip = fig.axes[-1]
    widths = [bar.get_width() / 0.96 for container in strip.containers for bar in container]
    assert widths == pytest.approx([128, 128, 128, 128, 200])


def test_bars_and_their_legend():
    fig = errors.bars({"g": {"a": 1.0, "b": 2.0}, "h": {"a": 3.0, "b": 4.0}}, "error")
    (ax,) = fig.axes
    assert [heights(container) for container in ax.containers] == [[1.0, 3.0], [2.0, 4.0]]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b"]
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["g", "h"]
    assert ax.get_ylabel() == "error"


def test_accumulation_averages_bins_of_positions():
    static, accumulated = torch.arange(300.0), 2 * torch.arange(300.0)
    fig = errors.accumulation({"m": (static, accumulated)}, "KL, in nats", start=384, bin_size=100)
    one, other = fig.axes[0].lines
    assert one.get_xdata().tolist() == [434, 534, 634]
    assert one.get_ydata().tolist() == pytest.approx([49.5, 149.5, 249.5])
    assert other.get_ydata().tolist() == pytest.approx([99.0, 299.0, 499.0])
    assert one.get_linestyle() != other.get_linestyle()
    assert all(labels(fig))


def test_magnitude_shares_are_drawn_in_percent():
    (ax,) = errors.magnitude_shares([0.01, 1.0], {"m": [0.4, 0.1]}).axes
    assert ax.lines[0].get_xdata().tolist() == pytest.approx([1, 100])
    assert ax.lines[0].get_ydata().tolist() == pytest.approx([40, 10])


def test_token_norms_draw_evenly_chosen_points_and_count_all():
    norms = torch.rand(5000) + 1
    fig = errors.token_norms(norms, {"m": 1.1 * norms}, most_points=500)
    joint = next(ax for ax in fig.axes if ax.collections)
    points = torch.tensor(joint.collections[0].get_offsets().data)
    assert points.shape == (500, 2)
    assert torch.allclose(points[:, 1], 1.1 * points[:, 0], rtol=1e-5)
    counts = next(sum(bar.get_height() for bar in ax.containers[0]) for ax in fig.axes if ax.containers)
    assert counts == 5000


def test_error_by_token():
    values = torch.rand(128)
    (ax,) = errors.by_token({"m": values}).axes
    assert torch.equal(torch.tensor(ax.lines[0].get_ydata()), values)


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


class TestTokenErrors:
    def test_parts_add_up(self):
        x = torch.randn(3, 128, 64)
        x_hat = 1.2 * x + 0.1 * torch.randn_like(x)
        found = token_errors(x, x_hat)
        distance = (x - x_hat).norm(dim=-1)
        assert torch.allclose(found.magnitude + found.direction, distance.square(), rtol=1e-5)
        assert torch.allclose(found.relative, distance / x.norm(dim=-1))
        cosine = torch.cosine_similarity(x.double(), x_hat.double(), dim=-1)
        expected = 2 * x.double().norm(dim=-1) * x_hat.double().norm(dim=-1) * (1 - cosine)
        assert torch.allclose(found.direction.double(), expected, rtol=1e-3, atol=1e-4)

    def test_share_of_the_largest(self):
        x = torch.eye(4)
        # One token of wrong length and large error, three of wrong direction and small error.
        x_hat = torch.stack([3 * x[0], *(torch.nn.functional.normalize(x[i] + 0.1 * x[0], dim=0) for i in (1, 2, 3))])
        found = token_errors(x, x_hat)
        assert found.magnitude_share(0.25) == pytest.approx(1.0)
        assert found.magnitude_share(0.01) == pytest.approx(1.0)  # at least one token
        assert found.magnitude_share() == pytest.approx(0.25, abs=0.01)

    def test_tokens_of_length_zero(self):
        found = token_errors(torch.zeros(2, 4), torch.tensor([[0.0, 0, 0, 0], [1, 0, 0, 0]]))
        assert found.relative.tolist() == [0.0, float("inf")]
        assert found.magnitude_share() == pytest.approx(0.5)

    def test_bad_arguments(self):
        with pytest.raises(ValueError, match=r"restored must have the shape \[2, 4\] of original, got \[2, 3\]"):
            token_errors(torch.zeros(2, 4), torch.zeros(2, 3))
        with pytest.raises(ValueError, match=r"largest must be above 0 and at most 1, got 1\.5"):
            token_errors(torch.ones(2, 4), torch.ones(2, 4)).magnitude_share(1.5)


def test_rows_of_committed_results(tmp_path):
    assert memory.read_rows(tmp_path, "generate") == ([], "")
    (tmp_path / "bench_generate_a.json").write_text('[{"step_ms": 1}]')
    save([{"step_ms": 2}], "generate_b", tmp_path)
    (tmp_path / "bench_attention.json").write_text('[{"packed": 3}]')
    rows, made = memory.read_rows(tmp_path, "generate")
    assert rows == [{"step_ms": 1}, {"step_ms": 2}]
    assert f"torch {torch.__version__}" in made
    assert memory.read_rows(tmp_path, "attention") == ([{"packed": 3}], "")
