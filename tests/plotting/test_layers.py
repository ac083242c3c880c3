"""Figures of layers show the data they are given."""

import copy

import torch

from kvarn_hf.plotting import layers as figures


class TestFigures:
    def test_heads(self):
        values = torch.rand(6, 3)
        values[4, 1] = 5
        ax, _ = figures.heads(values, range(6), "error / %").axes
        assert torch.equal(torch.as_tensor(ax.images[0].get_array().data), values.T)
        marks = [mark.get_position() for mark in ax.texts]
        assert len(marks) == 3 and marks[0] == (4, 1)
        assert ax.get_title() == "error / %" and ax.get_xlabel().startswith("layer") and ax.get_ylabel() == "KV head"

    def test_channels(self):
        sides = {"keys": [torch.ones(2, 8) for _ in range(4)], "values": [torch.ones(2, 8) for _ in range(4)]}
        size = copy.deepcopy(sides)
        size["keys"][2][1, 3] = 40
        keys, values = figures.channels(size, sides, range(4), (16.0, 8.0)).axes
        assert [text.get_text() for text in keys.texts] == ["2"] and not values.texts
        assert list(keys.lines[0].get_ydata()) == [1, 1, 40, 1]
        assert keys.get_ylabel() and keys.get_xlabel() and keys.get_yscale() == "log"

    def test_widths(self):
        (ax,) = figures.widths({"a": [1.0, 2.0], "b": [3.0, 4.0]}, [0, 3], "error / %").axes
        assert [list(line.get_ydata()) for line in ax.lines] == [[1, 2], [3, 4]]
        assert list(ax.lines[0].get_xdata()) == [0, 3]
        looks = [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in ax.lines]
        assert all(len(set(part)) == 2 for part in zip(*looks, strict=True))  # told apart in black and white too

    def test_trade_off(self):
        points = [figures.Point("small", 1024, 0.1, False), figures.Point("skip 1", 2048, 0.01, True)]
        (ax,) = figures.trade_off(points, 0.05, "skip 1", "small").axes
        assert [text.get_text() for text in ax.texts][:2] == ["small", "skip 1 (suggested)"]
        assert [tuple(c.get_offsets()[0]) for c in ax.collections] == [(1, 0.1), (2, 0.01)]
        assert "nats" in ax.get_ylabel() and "KiB" in ax.get_xlabel()
