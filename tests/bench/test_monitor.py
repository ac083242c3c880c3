"""``kvarn bench monitor``: what its rows hold."""

import json

import pytest
import torch

from kvarn_hf import KVarNCache
from kvarn_hf.bench import monitor as bench_monitor


class TestBench:
    def test_steps_with_and_without(self, monkeypatch, tmp_path, capsys):
        made = []

        class Noted(KVarNCache):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                made.append(self)

        monkeypatch.setattr(bench_monitor, "KVarNCache", Noted)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        rows = bench_monitor.monitor("tiny", (300,), (2,), segments=1, device="cpu", out=tmp_path)
        assert [(row["batch"], row["monitor"]) for row in rows] == [(2, False), (2, True)]
        for row in rows:
            assert 0 < row["median_step_ms"] < row["packing_step_ms"]
        off, on = rows
        assert [cache.report()["tiles"] for cache in made] == [2, 2]  # a tile in each of two segments
        assert [{record["tiles"] for record in cache.report().records} for cache in made] == [set(), {4}]
        assert off["overhead"] == 0
        assert on["overhead"] == pytest.approx(on["step_ms"] / off["step_ms"] - 1)
        assert json.loads((tmp_path / "bench_monitor.json").read_text())["results"] == rows
        assert "300" in capsys.readouterr().out

    def test_unknown_shape(self):
        with pytest.raises(ValueError, match=r"shape must be of llama-3\.1-8b, tiny, got 'big'"):
            bench_monitor.monitor("big", device="cpu")
