"""Warnings, the report, and bad arguments of the monitor."""

import copy
import io
import warnings

import pytest
import torch
from rich.console import Console

from kvarn_hf import KVarNCache, Monitor, MonitorWarning
from kvarn_hf.method.rotation import rotate
from kvarn_hf.monitor.log import FIGURES, SIDES
from tests.monitor.common import BATCH, HEADS, SMALL, chained, fed, kv, spiked


class TestWarnings:
    def test_ordinary_tiles_raise_none(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fed(*kv(2000, dtype=torch.bfloat16)).report()

    def test_error_far_from_the_history_is_named_once(self):
        keys, values = kv(16 + 64 * 12 + 32)
        cache = KVarNCache(kvarn=SMALL, monitor=True)
        cache.update(keys, values, 0)
        keys[1, 1, 16 + 64 * 9 : 16 + 64 * 10] = rotate(spiked(seed=1))
        cache.update(keys, values, 1)
        with pytest.warns(MonitorWarning) as caught:
            cache.report()
        assert len(caught) == 1
        message = str(caught[0].message)
        assert message.startswith(
            "layer 1, KV head 1, tile 9 (tokens 592 to 655, row 1): keys have a relative error of"
        )
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cache.report()  # once
            repr(cache), str(copy.deepcopy(cache).report())

    def test_seven_tiles_are_no_history(self):
        keys, values = kv(16 + 64 * 3 + 32)  # of two rows
        keys[1, 1, 16:80] = rotate(spiked(seed=1))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fed(keys, values).report()

    def test_slow_normalization_is_named_once(self):
        keys, values = kv(16 + 64 * 3 + 32)
        values[0, 1, 16 + 64 : 16 + 128] = rotate(chained())
        values[1, 1, 16 + 128 : 16 + 192] = rotate(chained())
        cache = fed(keys, values, layers=1, monitor=Monitor(tolerance=0.005))
        with pytest.warns(MonitorWarning) as caught:
            cache.report()
        assert len(caught) == 1
        message = str(caught[0].message)
        expected = "layer 0, KV head 1, tile 1 (tokens 80 to 143, row 0): values still change after 10 rounds of"
        assert message.startswith(expected)
        assert message.endswith("more of its tiles too")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cache.report()
            fed(keys, values, layers=1, monitor=Monitor(max_iterations=60, tolerance=0.005)).report()

    def test_bounds_are_the_monitors(self):
        keys, values = kv(16 + 64 * 8 + 32)
        with pytest.warns(MonitorWarning, match="still change after 1 rounds"):
            fed(keys, values, monitor=Monitor(max_iterations=1, tolerance=1e-4)).report()
        with pytest.warns(MonitorWarning, match="relative error"):
            fed(keys, values, monitor=Monitor(error_factor=1.001)).report()


class TestReport:
    def test_prints_as_a_table_and_reads_as_a_dictionary(self):
        cache = fed(*kv(300))
        report = cache.report()
        assert report["packed_tokens"] == 192 and dict(report)["layers"] == 2
        out = io.StringIO()
        Console(file=out, width=160).print(report)
        for text in (out.getvalue(), str(report)):
            assert "300 tokens = 16 sink + 192 packed + 92 tail" in text
            for part in ("worst token", "imbalance", "keys", "values"):
                assert part in text
        record = next(r for r in report.records if r["side"] == "keys")
        assert {"layer", "head", "side", "tiles", "largest_error", "worst_row", *FIGURES} == set(record)
        assert len(report.records) == 2 * HEADS * 2
        assert len(report.tile_records) == 2 * HEADS * 2 * BATCH * 3

    def test_without_a_monitor_there_is_no_table(self):
        report = fed(*kv(300), monitor=False).report()
        assert report.records == report.tile_records == []
        assert "worst token" not in str(report) and "packed" in str(report)

    def test_to_pandas(self):
        pytest.importorskip("pandas")
        report = fed(*kv(300)).report()
        assert list(report.to_pandas()["side"].unique()) == list(SIDES)
        assert len(report.to_pandas(tiles=True)) == len(report.tile_records)

    def test_the_mean_of_heads_and_rows(self):
        report = fed(*kv(300)).report()
        for record in report.records:
            where = {name: record[name] for name in ("layer", "head", "side")}
            tiles = [t for t in report.tile_records if where.items() <= t.items()]
            mean = sum(t["relative_error"] for t in tiles) / len(tiles)
            assert record["relative_error"] == pytest.approx(mean)
            assert record["largest_error"] == pytest.approx(max(t["relative_error"] for t in tiles))
            worst = max(tiles, key=lambda t: t["worst_token_error"])
            assert (record["worst_token"], record["worst_row"]) == (worst["worst_token"], worst["row"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KVarNCache(monitor=0), "monitor must be True, False, a Monitor or an integer of at least 1, got 0"),
        (lambda: KVarNCache(monitor="yes"), "monitor must be .* got 'yes'"),
        (lambda: Monitor(every=0), "every must be an integer of at least 1, got 0"),
        (lambda: Monitor(every=True), "every must be an integer of at least 1, got True"),
        (lambda: Monitor(max_iterations=65), "max_iterations must be an integer from 1 to 64, got 65"),
        (lambda: Monitor(tolerance=0), "tolerance must be a number above 0, got 0"),
        (lambda: Monitor(error_factor=1), "error_factor must be a number above 1, got 1"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("monitor", [None, False])
def test_off(monitor):
    cache = fed(*kv(300), monitor=monitor)
    assert cache.monitor is None and cache.layers[0].log is None
