"""What a cache has handed out stays what it was, and changing it changes nothing in the cache."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvarn_hf import KVarNCache
from tests.cases.common import SMALL, filled, random_kv, read, same

LENGTHS = (60, 300, 1_130)  # nothing is packed; there are tiles; there is room for one more


def changed(cache: KVarNCache, new: int, seed: int) -> None:
    """Remove a token, and append others in its place."""
    cache.crop(-1)
    cache.update(*random_kv(1, 2, new, 32, seed=seed), 0)


@pytest.mark.parametrize("side", ["keys", "values"])
def test_case_28_what_a_layer_shows_is_a_copy_at_every_length(side):
    """Edits in place that work for a while: kept while nothing is packed, lost later (kvpress PR 225)."""
    for length in (10, 60, 300):
        cache = filled(*random_kv(1, 2, length, 32))
        before = read(cache)
        getattr(cache.layers[0], side)[:, :, 2:8] = 0
        assert same(read(cache), before), f"{length} tokens"
    assert "copy" in (getattr(type(cache.layers[0]), side).__doc__ or "")


def test_case_33_what_update_returned_stays():
    """Keys that change later: what ``update()`` returned shows the tokens appended behind a crop."""
    for length in LENGTHS:
        cache = filled(*random_kv(1, 2, length, 32))
        returned = cache.update(*random_kv(1, 2, 2, 32, seed=1), 0)
        before = [x.clone() for x in returned]
        changed(cache, 3, seed=2)
        assert same(list(returned), before), f"{length} tokens"


def test_case_33_what_update_returned_lazily_stays():
    """Keys that change later: attention over lazily read tokens is computed when somebody touches them."""

    class Attention:
        config = SimpleNamespace(_attn_implementation="sdpa")  # what tells the cache how it will be read

        def step(self, cache, tokens):
            return cache.update(*tokens, 0)

    cache = filled(*random_kv(1, 2, 300, 32))
    other = copy.deepcopy(cache)
    token, query = random_kv(1, 2, 1, 32, seed=1), random_kv(1, 2, 1, 32, seed=3)[0]
    right = scaled_dot_product_attention(query, *Attention().step(other, token))
    returned = Attention().step(cache, token)
    changed(cache, 3, seed=2)
    assert torch.equal(scaled_dot_product_attention(query, *returned), right)


@pytest.mark.parametrize("side", ["keys", "values"])
def test_case_58_what_a_layer_showed_stays(side):
    """Keys that change later: what ``layer.keys`` showed shows the tokens appended behind a crop."""
    for length in LENGTHS:
        cache = filled(*random_kv(1, 2, length, 32))
        shown = getattr(cache.layers[0], side)
        before = shown.clone()
        changed(cache, 3, seed=2)
        assert torch.equal(shown, before), f"{length} tokens"


@pytest.mark.parametrize(("length", "new"), [*((length, 1) for length in LENGTHS), (1_130, 70)])
def test_case_58_shallow_copies_of_a_layer_do_not_overwrite_each_other(length, new):
    """A twin overwritten: two copies of a layer append to the same storage."""
    cache = filled(*random_kv(1, 2, length, 32))
    twins = [cache.layers[0], copy.copy(cache.layers[0])]
    tokens = [random_kv(1, 2, new, 32, seed=seed) for seed in (1, 2)]
    alone = [filled(*random_kv(1, 2, length, 32)).layers[0] for _ in twins]
    for part in range(2):
        for twin, single, added in zip(twins, alone, tokens, strict=True):
            for layer in (twin, single):
                layer.update(*(x + part for x in added))
    for twin, single in zip(twins, alone, strict=True):
        assert same([twin.keys, twin.values], [single.keys, single.values])


def test_case_58_a_state_taken_before_a_crop_to_a_tile_stays():
    """A twin overwritten: behind a crop to whole tiles, new tiles take the place of those a copy still reads."""
    cache = filled(*random_kv(1, 2, 600, 32))
    twin = copy.copy(cache.layers[0])
    before = [twin.keys.clone(), twin.values.clone()]
    cache.crop(16 + 64 * 4)
    cache.update(*random_kv(1, 2, 300, 32, seed=1), 0)
    assert same([twin.keys, twin.values], before)
    assert SMALL.tile_size == 64
