"""Figures of the monitor against a direct computation."""

import pytest
import torch

from kvarn_hf import KVarNConfig
from kvarn_hf.method.normalize import imbalance_trace
from kvarn_hf.method.rotation import rotate
from kvarn_hf.monitor.log import FIGURES
from tests.monitor.common import BATCH, DIM, HEADS, assert_same_figures, errors_of, fed, figures, kv, spiked


class TestFigures:
    @pytest.mark.parametrize("preset", ["kvarn_k4v2_g64", "kvarn_k2v4_g64"])
    @pytest.mark.parametrize("method", ["kvarn", "published", "hadamard", "rtn"])
    def test_errors_are_those_of_what_is_read(self, method, preset):
        config = KVarNConfig.from_preset(preset, sink_length=16, residual_length=32, method=method)
        keys, values = kv(16 + 64 * 5 + 40)
        keys[:, 1, :, 3] *= 20
        cache = fed(keys, values, config=config)
        for layer, found in zip(cache.layers, figures(cache), strict=True):
            assert found.shape == (BATCH, HEADS, 5, 2, len(FIGURES))
            for side, given, read in ((0, keys, layer.keys), (1, values, layer.values)):
                given, read = (x[:, :, 16 : 16 + 64 * 5].unflatten(2, (5, 64)) for x in (given, read))
                expected = errors_of(given, read).float()
                torch.testing.assert_close(found[..., side, :5], expected, rtol=1e-3, atol=2e-4)

    def test_imbalance_and_rounds(self):
        keys, values = kv(16 + 64 * 3 + 32)
        keys[:, 0, ::2] *= 5  # uneven tokens
        cache = fed(keys, values, layers=1)
        before, after, rounds = (
            figures(cache)[0][..., FIGURES.index(name)]
            for name in ("imbalance_before", "imbalance_after", "iterations")
        )
        assert (after < before).all()
        assert (before[:, 0, :, 0] > 1.2 * before[:, 1, :, 0]).all()
        assert ((rounds >= 1) & (rounds <= 5)).all()
        tile = rotate(values[:, :, 16:].unflatten(2, (-1, 32))[:, :, :6].reshape(BATCH, HEADS, 3, 64, DIM))
        trace = imbalance_trace(tile, 2)
        torch.testing.assert_close(before[..., 1], trace[..., 0])
        torch.testing.assert_close(after[..., 1], trace[..., 2])

    def test_prescale_names_the_outlier_head(self):
        keys, values = kv(400)
        keys[:, 1, :, 5] *= 100
        records = [r for r in fed(keys, values).report().records if r["side"] == "keys"]
        assert {(r["layer"], r["head"]): r["prescale"] > 20 for r in records} == {
            (0, 0): False,
            (0, 1): True,
            (1, 0): False,
            (1, 1): True,
        }

    @pytest.mark.filterwarnings("ignore::kvarn_hf.MonitorWarning")
    def test_worst_token_and_head_are_found(self):
        keys, values = kv(16 + 64 * 4 + 32)
        position = 16 + 2 * 64 + 37
        # A token along one rotated channel, in values of 2 bits: the grid of its row has one far value.
        values[1, 0, position] = 50 * rotate(torch.eye(DIM))[7] + values[1, 0, position]
        keys[:, 1, 16 + 64 : 16 + 128] = rotate(spiked(seed=1))
        report = fed(keys, values, layers=1).report()
        worst = max((r for r in report.records if r["side"] == "keys"), key=lambda r: r["largest_error"])
        assert worst["head"] == 1
        tiles = [t for t in report.tile_records if t["side"] == "keys"]
        assert {(t["head"], t["tile"]) for t in sorted(tiles, key=lambda t: -t["relative_error"])[:BATCH]} == {(1, 1)}
        record = next(r for r in report.records if (r["side"], r["head"]) == ("values", 0))
        read = errors_of(values[:, 0, 16:272], fed(keys, values, layers=1).layers[0].values[:, 0, 16:272])
        row = int(read[:, 3].argmax())
        assert (record["worst_row"], record["worst_token"]) == (row, 16 + int(read[row, 4]))
        assert record["worst_token_error"] == pytest.approx(read[row, 3].item(), rel=1e-3)

    def test_every_third_tile(self):
        keys, values = kv(16 + 64 * 8 + 32)
        every, third = fed(keys, values).report().tile_records, fed(keys, values, monitor=3).report().tile_records
        assert {record["tile"] for record in third} == {0, 3, 6}
        assert third == [record for record in every if record["tile"] % 3 == 0]
        assert_same_figures(figures(fed(keys, values, steps=50, monitor=3)), figures(fed(keys, values, monitor=3)))

    def test_a_prompt_in_parts(self, monkeypatch):
        keys, values = kv(16 + 64 * 9 + 32)
        whole = figures(fed(keys, values, monitor=2))
        monkeypatch.setattr("kvarn_hf.monitor.log._CHUNK_ELEMENTS", 2 * BATCH * HEADS * 64 * DIM)
        assert_same_figures(figures(fed(keys, values, monitor=2)), whole)

    def test_broken_and_huge_tokens(self):
        keys, values = kv(16 + 64 * 2 + 32)
        clean = figures(fed(keys, values, layers=1))[0]
        keys[0, 0, 40] = torch.nan
        keys[1, 0] *= 2.0**12
        keys[1, 1] *= 2.0**100  # more than the scales can hold, and its square more than float32 can
        values[1, 1] = 0
        found = figures(fed(keys, values, layers=1))[0]
        assert found.isfinite().all()
        torch.testing.assert_close(found[0, 1], clean[0, 1])
        torch.testing.assert_close(found[1, 0, :, 0], clean[1, 0, :, 0], rtol=1e-3, atol=1e-4)
        assert (found[1, 1, :, 0, 0] > 0.5).all()
        assert (found[1, 1, :, 1, :4] == 0).all()
