"""Keys and values without data, as an attention finds them that was not written with them in mind."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import repeat_kv

from kvarn_hf import KVarNCache, KVarNConfig, ops
from kvarn_hf.layers.reading import LazyStates
from kvarn_hf.ops import dispatch

CONFIG = KVarNConfig(tile_size=64, sink_length=8, residual_length=8)
LENGTH = 210


class Attention:
    """Stands for a module of a model: a cache looks at its config."""

    config = SimpleNamespace(_attn_implementation="sdpa")

    def update(self, cache, keys, values):
        return cache.update(keys, values, 0)


def lazy(new: int = 1):
    """Lazy keys and values of ``[2, 2, LENGTH, 64]``, the newest ``new`` tokens just added; and their cache."""
    cache = KVarNCache(kvarn=CONFIG)
    keys, values = torch.randn(2, 2, 2, LENGTH, 64, generator=torch.Generator().manual_seed(0))
    cache.update(keys[:, :, :-new], values[:, :, :-new], 0)
    states = Attention().update(cache, keys[:, :, -new:], values[:, :, -new:])
    assert all(isinstance(x, LazyStates) for x in states)
    return *states, cache


def query(new: int = 1, batch: int = 2, heads: int = 2) -> torch.Tensor:
    return torch.randn(batch, heads, new, 64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("new", "fused", "mask"),
    [
        (1, True, None),
        (1, True, torch.rand(2, 1, 1, LENGTH) > 0.5),
        (4, True, torch.randn(1, 2, 4, LENGTH)),
        (1, False, torch.rand(1, LENGTH) > 0.5),
        (4, False, torch.rand(4, LENGTH) > 0.5),
        (4, False, torch.rand(2, 4, LENGTH) > 0.5),
        (1, False, torch.randn(2, 1, 1, 1)),
    ],
)
def test_masks_of_any_shape(new, fused, mask):
    keys, values, cache = lazy(new)
    out = scaled_dot_product_attention(query(new), keys, values, mask)
    expected = scaled_dot_product_attention(query(new), keys.dense(), values.dense(), mask)
    assert cache.layers[0].reads["fused"] == fused
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("shape", [(2, 1, 64), (1, 2, 1, 64)])
def test_queries_of_other_shapes(shape):
    keys, values, _ = lazy()
    out = scaled_dot_product_attention(query().flatten()[: 64 * 2].reshape(shape), keys, values)
    expected = scaled_dot_product_attention(query().flatten()[: 64 * 2].reshape(shape), keys.dense(), values.dense())
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("mask", [torch.ones(2, 1, 5, LENGTH) > 0, torch.ones(2, 1, 1, LENGTH + 10) > 0])
def test_wrong_masks_are_refused(mask):
    keys, values, _ = lazy()
    with pytest.raises(RuntimeError):
        scaled_dot_product_attention(query(), keys, values, mask)


@pytest.mark.parametrize("change", [lambda x: x.mul_(2), lambda x: x.zero_(), lambda x: x[:, :, :9].fill_(1)])
def test_changes_in_place_count(change):
    keys, values, cache = lazy()
    held = cache.layers[0].keys
    expected_keys, expected_values = keys.dense().clone(), values.dense().clone()
    keys, values, cache = lazy()
    change(keys)
    change(expected_keys)
    out = scaled_dot_product_attention(query(), keys, values)
    assert torch.equal(out, scaled_dot_product_attention(query(), expected_keys, expected_values))
    assert torch.equal(cache.layers[0].keys, held)


def test_changes_of_repeated_heads_count():
    keys, values, cache = lazy()
    keys, values = (x[:, :, None, :, :].expand(2, 2, 3, LENGTH, 64).reshape(2, 6, LENGTH, 64) for x in (keys, values))
    keys.mul_(2)
    out = scaled_dot_product_attention(query(heads=6), keys, values)
    held = cache.layers[0].keys, cache.layers[0].values
    expected = [x.repeat_interleave(3, 1) for x in held]
    assert torch.equal(out, scaled_dot_product_attention(query(heads=6), expected[0] * 2, expected[1]))


def test_scores_are_precise_under_autocast():
    keys, values, cache = lazy()
    expected = scaled_dot_product_attention(query(), keys, values)
    with torch.autocast("cpu", torch.bfloat16):
        out = scaled_dot_product_attention(query(), keys, values)
    assert cache.layers[0].reads == {"fused": 2, "dequantized": 0}
    assert torch.equal(out, expected)


@pytest.mark.parametrize("padding", [0, 50])
def test_a_query_that_sees_nothing_is_finite(padding):
    keys, values = torch.randn(2, 2, 2, LENGTH, 64, generator=torch.Generator().manual_seed(0))
    for x in (keys, values):
        x[0, :, :padding] = x[0, :, :1]
    cache = KVarNCache(kvarn=CONFIG)
    cache.update(keys, values, 0)
    mask = torch.zeros(2, 1, 1, LENGTH)
    mask[0] = -torch.inf
    state = cache.layers[0].state
    assert ops.attend(state, query(), mask).isfinite().all()
    assert torch.equal(ops.attend(state, query(), mask)[1], ops.attend(state, query(), None)[1])


def test_kernels_without_a_backward_pass_are_not_asked_for_one(monkeypatch):
    _, _, cache = lazy()
    monkeypatch.setattr(dispatch, "uses_kernels", lambda device: True)
    assert ops.attend(cache.layers[0].state, query().requires_grad_(), None) is None


def test_repeated_heads_stay_lazy():
    """As Transformers repeats KV heads for a masked batch; anything else on the way is done to dense tensors."""
    keys, values, cache = lazy()
    repeated = [repeat_kv(x, 3) for x in (keys, values)]
    assert all(isinstance(x, LazyStates) for x in repeated)
    batch, heads, length, head_dim = keys.shape
    query = torch.randn(batch, 3 * heads, 1, head_dim)
    mask = torch.rand(batch, 1, 1, length) > 0.3
    before = dict(cache.layers[0].reads)
    out = scaled_dot_product_attention(query, *repeated, attn_mask=mask)
    assert cache.layers[0].reads["fused"] == before["fused"] + 1
    assert cache.layers[0].reads["dequantized"] == before["dequantized"]
    dense = [repeat_kv(x, 3) for x in (cache.layers[0].keys, cache.layers[0].values)]
    torch.testing.assert_close(out, scaled_dot_product_attention(query, *dense, attn_mask=mask), rtol=1e-4, atol=1e-5)

    assert torch.equal(repeated[0] * 1, dense[0])
    grouped = keys[:, :, None, :, :]
    wide = cache.layers[0].keys[:, :, None].expand(-1, -1, 3, -1, -1)
    assert torch.equal(grouped.expand(batch, heads, 3, length, head_dim) * 1, wide)
    assert torch.equal(grouped.expand(-1, -1, 3, -1, -1) * 1, wide)
    assert torch.equal(grouped.reshape(batch, heads, length, head_dim) * 1, cache.layers[0].keys)
    assert torch.equal(grouped.reshape(batch, -1) * 1, cache.layers[0].keys.reshape(batch, -1))
