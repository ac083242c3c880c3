"""A run of equal tokens at a row's start is stored once and read exactly."""

from __future__ import annotations

import pytest
import torch

from kvarn_hf import KVarNCache, KVarNConfig

CONFIG = KVarNConfig(tile_size=64, sink_length=16, residual_length=16)
METHODS = ("kvarn", "published", "hadamard", "rtn")


def tokens(lead: list[int], length: int, dim: int = 32, seed: int = 0):
    """Keys and values of a batch whose row i begins with ``lead[i]`` equal tokens."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, len(lead), 2, length, dim, generator=generator)
    for row, n in enumerate(lead):
        x[:, row, :, :n] = x[:, row, :, :1].clone()
    return x[0], x[1]


def filled(keys, values, sizes=None, config=CONFIG):
    cache, start = KVarNCache(kvarn=config), 0
    for size in sizes or [keys.shape[2]]:
        cache.update(keys[:, :, start : start + size], values[:, :, start : start + size], 0)
        start += size
    return cache


class TestRepeatedTokens:
    """A run of equal tokens is stored once, whatever its tokens mean."""

    LEAD = (0, 2, 40, 64, 100, 200, 299)

    @pytest.mark.parametrize("method", METHODS)
    def test_runs_and_what_follows_them_are_exact(self, method):
        """As in a model without positions, where the same token always has the same key."""
        keys, values = tokens(list(self.LEAD), 300)
        layer = filled(keys, values, config=CONFIG.replace(method=method)).layers[0]
        for row, lead in enumerate(self.LEAD):
            exact = lead + CONFIG.sink_length
            assert torch.equal(layer.keys[row, :, :exact], keys[row, :, :exact])
            assert torch.equal(layer.values[row, :, :exact], values[row, :, :exact])

    @pytest.mark.parametrize("sizes", [[1] * 300, [7] * 42 + [6], [150, 150], [90, 1, 1, 208]])
    def test_chunks_read_the_same(self, sizes):
        keys, values = tokens(list(self.LEAD), 300)
        whole, pieces = filled(keys, values), filled(keys, values, sizes)
        assert torch.equal(whole.layers[0].keys, pieces.layers[0].keys)
        assert torch.equal(whole.layers[0].values, pieces.layers[0].values)
        assert whole.memory_footprint() == pieces.memory_footprint()

    def test_a_run_that_goes_on_past_a_flush(self):
        """What is not seen to the end when the first tile is packed is followed up."""
        keys, values = tokens([250, 0], 400)
        cache = filled(keys, values, [130, 100, 60, 110])
        assert cache.layers[0].state.padding.length.tolist() == [250, 0]
        assert torch.equal(cache.layers[0].keys[0, :, :266], keys[0, :, :266])

    def test_rows_of_equal_tokens_only(self):
        keys = torch.full((3, 2, 300, 32), 0.7)
        keys[1] = -1e4
        keys[2] = 0
        layer = filled(keys, keys / 3).layers[0]
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, keys / 3)

    def test_a_row_moves_with_its_padding(self):
        keys, values = tokens([0, 100, 40], 300)
        cache = filled(keys[:, :, :200], values[:, :, :200])
        rows = torch.tensor([2, 1, 1, 0])
        cache.batch_select_indices(rows)
        cache.update(keys[rows][:, :, 200:], values[rows][:, :, 200:], 0)
        whole = filled(keys[rows], values[rows])
        assert torch.equal(cache.layers[0].keys, whole.layers[0].keys)
        assert cache.layers[0].state.padding.length.tolist() == [40, 100, 100, 0]

    @pytest.mark.parametrize("length", [10, 16, 80, 144, 208, 290])
    def test_crop_keeps_values(self, length):
        keys, values = tokens(list(self.LEAD), 300)
        cache = filled(keys, values)
        before = cache.layers[0].keys.clone()
        cache.crop(length - 300)
        assert torch.equal(cache.layers[0].keys, before[:, :, :length])

    def test_one_row_has_no_padding(self):
        """A single prompt that begins with equal tokens keeps its sinks where they are."""
        keys, values = tokens([100], 300)
        layer = filled(keys, values).layers[0]
        assert layer.state.padding is None
        assert torch.equal(layer.keys[:, :, :16], keys[:, :, :16])

    def test_an_outlier_channel_is_found_behind_the_padding(self):
        """The keys' channel factors come from the row's own tokens, not from its padding."""
        keys, values = tokens([128, 0], 428)
        keys[0, :, 128:, 5] *= 100
        padded = filled(keys, values).layers[0]
        alone = filled(keys[:1, :, 128:], values[:1, :, 128:]).layers[0]
        assert torch.equal(padded.state.prescale[0], alone.state.prescale[0])
        assert torch.equal(padded.keys[0, :, 128:], alone.keys[0])
