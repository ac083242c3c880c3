"""Figures of errors show the data they are given."""

import pytest
import torch

from kvarn_hf.plotting import errors
from tests.plotting.common import heights, labels


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
