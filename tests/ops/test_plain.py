"""The path without kernels: cutting the work into chunks changes nothing, and tiles are those of the method."""

import pytest
import torch

from kvarn_hf import KVarNCache, KVarNConfig, ops
from kvarn_hf.method.quantize import quantize_keys, quantize_values
from kvarn_hf.ops import plain
from kvarn_hf.state.tiles import PackedTiles

CPU = torch.device("cpu")
TILE = 64


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quantized(keys, values, config, prescale=None, first=None, position=0, before=0):
    batch, heads, tokens, key_dim = keys.shape
    count = tokens // config.tile_size
    tiles = PackedTiles.allocate(batch, heads, key_dim, values.shape[3], config, before + count, CPU)
    for tensor in tiles.parts.values():
        tensor.fill_(7)
    tiles = tiles.truncated(before)
    ops.quantize(keys, values, prescale, tiles, config, position, first)
    return tiles.truncated(before + count)


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("elements", [1, 3 * 2 * 3 * TILE * 32, 1 << 30])
@pytest.mark.parametrize("method", ["kvarn", "published", "hadamard", "rtn"])
def test_chunks_change_nothing(monkeypatch, elements, method):
    config = KVarNConfig(tile_size=TILE, method=method, key_bits=3)
    keys, values = gaussian(2, 3, 7 * TILE, 32), gaussian(2, 3, 7 * TILE, 48, seed=1)
    prescale = (1 + gaussian(2, 3, 32, seed=2).abs()).half()

    def cache():
        cache = KVarNCache(kvarn=config.replace(sink_length=16, residual_length=32))
        cache.update(keys, values, 0)
        return cache.layers[0].keys, cache.layers[0].values

    tiles, read = quantized(keys, values, config, prescale), cache()
    monkeypatch.setattr(plain, "_TILE_ELEMENTS", elements)
    again = quantized(keys, values, config, prescale)
    assert_same(again.filled()[0], tiles.filled()[0])
    assert_same(again.filled()[1], tiles.filled()[1])
    assert_same(cache(), read)


def test_chunks_cover_every_tile_once():
    for most in (1, 100, 1000):
        for count in (0, 1, 2, 17):
            chunks = plain._chunks(count, 100, most)
            assert [i for part in chunks for i in range(count)[part]] == list(range(count))


def test_fills_the_slots_behind_those_in_use():
    config = KVarNConfig(tile_size=TILE)
    keys, values = gaussian(2, 1, 2 * TILE, 16), gaussian(2, 1, 2 * TILE, 16, seed=1)
    tiles = quantized(keys, values, config, before=3)
    expected = quantized(keys, values, config)
    for ours, theirs in zip(tiles.filled(), expected.filled(), strict=True):
        assert_same([t[:, :, 3:] for t in ours], theirs)
        assert all((t[:, :, :3] == 7).all() for t in ours)


def test_tiles_are_those_of_the_reference():
    config = KVarNConfig(tile_size=TILE)
    keys, values = gaussian(2, 3, 2 * TILE, 32), gaussian(2, 3, 2 * TILE, 48, seed=1)
    prescale = (1 + gaussian(2, 3, 32, seed=2).abs()).half()
    packed_keys, packed_values = quantized(keys, values, config, prescale).filled()
    for b, h, i in ((0, 0, 0), (1, 2, 1)):
        tile = slice(i * TILE, (i + 1) * TILE)
        assert_same([t[b, h, i] for t in packed_keys], quantize_keys(keys[b, h, tile], prescale[b, h], config))
        assert_same([t[b, h, i] for t in packed_values], quantize_values(values[b, h, tile], config))


@pytest.mark.parametrize("position", [0, 1000])
def test_tokens_before_first_are_replaced_by_the_later_ones(position):
    config = KVarNConfig(tile_size=TILE)
    first = [0, 1, 20, 63, 64, 65, 100, 127, 128, 500]
    keys = gaussian(len(first), 1, 2 * TILE, 16)
    values = gaussian(len(first), 1, 2 * TILE, 16, seed=1)
    tiles = quantized(keys, values, config, first=torch.tensor(first) + position, position=position)
    for row, begin in enumerate(first):
        own_keys, own_values = keys[row : row + 1].clone(), values[row : row + 1].clone()
        source = []
        for start in (0, TILE):
            for token in range(start, start + TILE):
                while begin < start + TILE and token < begin:
                    token += start + TILE - begin
                source.append(token)
            if begin >= start + TILE:  # nothing in this tile counts
                own_keys[:, :, start : start + TILE] = own_values[:, :, start : start + TILE] = 0
        assert max(source) < 2 * TILE
        expected = quantized(own_keys[:, :, source], own_values[:, :, source], config)
        for ours, theirs in zip(tiles.filled(), expected.filled(), strict=True):
            assert_same([t[row : row + 1] for t in ours], theirs)


def test_replaced_tokens_shape_nothing():
    config = KVarNConfig(tile_size=TILE)
    keys, values = gaussian(1, 2, TILE, 16), gaussian(1, 2, TILE, 16, seed=1)
    first = torch.tensor([40])
    expected = quantized(keys, values, config, first=first).filled()
    keys[:, :, :40], values[:, :, :40] = 1e4, float("nan")
    for ours, theirs in zip(quantized(keys, values, config, first=first).filled(), expected, strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("padding", [TILE, 3 * TILE])
def test_row_behind_whole_tiles_of_padding_reads_as_it_does_alone(padding):
    config = KVarNConfig(tile_size=TILE, sink_length=16, residual_length=32)
    keys, values = gaussian(2, 2, 600, 16), gaussian(2, 2, 600, 24, seed=1)
    keys[..., 3] *= 40
    for x in (keys, values):
        x[1, :, :padding] = x[1, :, :1].clone()
    batch, alone = KVarNCache(kvarn=config), KVarNCache(kvarn=config)
    batch.update(keys, values, 0)
    alone.update(keys[1:, :, padding:], values[1:, :, padding:], 0)
    end = 16 + alone.report()["packed_tokens"]
    assert end > 16
    for side in ("keys", "values"):
        together, own = (getattr(cache.layers[0], side) for cache in (batch, alone))
        assert torch.equal(together[1, :, padding : padding + end], own[0, :, :end])
        assert torch.equal(together[1, :, :padding], together[1, :, :1].expand(-1, padding, -1))
