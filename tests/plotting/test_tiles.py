"""Figures of tiles show the data they are given."""

import pytest
import torch

from kvarn_hf.plotting import tiles
from tests.plotting.common import heights


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
