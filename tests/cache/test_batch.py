"""Operations on the batch move every region together, without quantizing again."""

from __future__ import annotations

import copy

import pytest
import torch

from kvarn_hf import KVarNCache, KVarNConfig
from tests.cache.common import count_quantize, filled, kv, read, same
from tests.storage import held_bytes


class TestBatchOperations:
    @pytest.mark.parametrize("length", [10, 90, 200, 256, 300])
    def test_everything_moves_together(self, length, monkeypatch):
        keys, values = kv(4, length + 200)
        start = filled(keys[:, :, :length], values[:, :, :length], layers=2)
        calls = count_quantize(monkeypatch)
        rows = torch.tensor([3, 3, 0, 1])
        for operation, kept in (
            (lambda c: c.reorder_cache(rows), rows),
            (lambda c: c.batch_repeat_interleave(3), torch.arange(4).repeat_interleave(3)),
            (lambda c: c.batch_select_indices(torch.tensor([2, 0])), torch.tensor([2, 0])),
            (lambda c: c.batch_select_indices((1, 1, 3)), torch.tensor([1, 1, 3])),
            (lambda c: c.batch_select_indices([-1]), torch.tensor([3])),
            (lambda c: c.batch_select_indices(torch.tensor([True, False, False, True])), torch.tensor([0, 3])),
        ):
            cache = copy.deepcopy(start)
            operation(cache)
            for layer_idx in range(2):
                assert same(read(cache, layer_idx), [t[kept] for t in read(start, layer_idx)])
            assert not calls
            # What follows is packed as if the rows had always been there.
            for layer_idx in range(2):
                cache.update(keys[kept][:, :, length:], values[kept][:, :, length:], layer_idx)
            whole = filled(keys[kept], values[kept])
            assert same(read(cache), read(whole))
            calls.clear()

    def test_reordering_many_times(self):
        keys, values = kv(3, 300)
        cache = filled(keys[:, :, :200], values[:, :, :200])
        generator = torch.Generator().manual_seed(0)
        rows = torch.arange(3)
        for i in range(200, 300):
            beam = torch.randint(0, 3, (3,), generator=generator)
            cache.reorder_cache(beam)
            rows = rows[beam]
            keys, values = keys[beam], values[beam]
            cache.update(keys[:, :, i : i + 1], values[:, :, i : i + 1], 0)
        assert same(read(cache), read(filled(keys, values)))

    def test_selecting_frees_memory(self):
        keys, values = kv(8, 300)
        cache = filled(keys, values)
        cache.batch_select_indices([5])
        assert held_bytes(cache) == cache.memory_footprint()
        alone = filled(keys[5:6], values[5:6]).memory_footprint()
        assert cache.memory_footprint() <= 1.1 * alone

    def test_bad_indices(self):
        cache = filled(*kv(2, 200))
        before = read(cache)
        with pytest.raises(ValueError, match=r"indices must be one-dimensional, got shape \[1, 2\]"):
            cache.batch_select_indices(torch.tensor([[0, 1]]))
        for indices, message in (([0, 2], "rows from -2 to 1, got"), ([-3], "rows from -2"), ([0.9], "integers, got")):
            with pytest.raises(ValueError, match=f"indices must hold {message}"):
                cache.batch_select_indices(indices)
        for repeats in (0, -1, 1.5):
            with pytest.raises(ValueError, match=f"repeats must be an integer >= 1, got {repeats}"):
                cache.batch_repeat_interleave(repeats)
        for tokens in (1.5, -1.5, None):
            with pytest.raises(ValueError, match=f"tokens_to_remove must be an integer, got {tokens}"):
                cache.crop(tokens)
        assert same(read(cache), before)


def test_emptied_after_batch_operations():
    """Rows that share their tiles have tiles of their own again once the cache has been emptied and refilled."""
    cache = KVarNCache(kvarn=KVarNConfig(tile_size=64, sink_length=8, residual_length=8))
    cache.update(torch.randn(1, 2, 200, 16), torch.randn(1, 2, 200, 16), 0)
    cache.batch_repeat_interleave(3)
    cache.crop(-200)
    keys, values = torch.randn(3, 2, 200, 16), torch.randn(3, 2, 200, 16)
    cache.update(keys, values, 0)
    fresh = KVarNCache(kvarn=cache.kvarn)
    fresh.update(keys, values, 0)
    assert torch.equal(cache.layers[0].keys, fresh.layers[0].keys)
    assert torch.equal(cache.layers[0].values, fresh.layers[0].values)
