"""Copies, rows, rollback and files of ``KVarNCache(max_cache_len=N)``."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from kvarn_hf import KVarNCache
from kvarn_hf.layers.fixed import StaticKVarNLayer
from kvarn_hf.layers.step import SharedStep
from tests import models_tiny as tiny
from tests.layers.common import SMALL, assert_holds, contents, filled


def test_copies_are_independent():
    model, cache = filled()
    held = contents(cache)
    for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        with torch.no_grad():
            for _ in range(80):
                tiny.forward(model, tiny.prompt(2, 1), copied)
        assert int(copied.get_seq_length()) == 281
        assert_holds(cache, held)
        assert int(cache.get_seq_length()) == 201


def test_copies_made_in_inference_mode():
    model, cache = filled()
    with torch.inference_mode():
        copies = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    expected = tiny.forward(model, tiny.prompt(2, 1), cache)
    for copied in copies:
        assert torch.equal(tiny.forward(model, tiny.prompt(2, 1), copied), expected)


def test_a_shallow_copy_of_a_layer_leaves_the_cache_as_it_is():
    model, cache = filled()
    other, token = copy.deepcopy(cache), tiny.prompt(2, 1)
    shared = copy.copy(cache.layers[0])
    assert shared.storage is cache.layers[0].storage
    for _ in range(2):
        assert torch.equal(tiny.forward(model, token, cache), tiny.forward(model, token, other))
    assert_holds(cache, contents(other))


def test_rows_move_together():
    _, cache = filled()
    held = contents(cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert_holds(cache, [(k.flip(0), v.flip(0)) for k, v in held])
    cache.batch_select_indices(torch.tensor([1]))
    assert_holds(cache, [(k[:1], v[:1]) for k, v in held])
    cache.batch_repeat_interleave(3)
    assert_holds(cache, [(k[:1].expand(3, -1, -1, -1), v[:1].expand(3, -1, -1, -1)) for k, v in held])


def test_rows_that_are_not_there_are_refused():
    _, cache = filled()
    before = contents(cache)
    with pytest.raises(ValueError, match=r"indices must hold rows from -2 to 1, got \[2\]"):
        cache.batch_select_indices([2])
    assert_holds(cache, before)


@pytest.mark.parametrize(("name", "options"), [("gemma3", {}), ("llama", {"skip_layers": [0]})])
def test_rows_and_batches_with_other_kinds_of_layers(name, options):
    model, runs = tiny.model(name), []
    for size in ({}, {"max_cache_len": 300}):
        cache, logits = KVarNCache(model.config, SMALL, **options, **size), []
        for batch in (2, 3):
            cache.reset()
            tiny.forward(model, tiny.prompt(batch, 150), cache)
            cache.batch_repeat_interleave(2)
            logits.append(tiny.forward(model, tiny.prompt(2 * batch, 1), cache))
            cache.batch_select_indices((3, 0))
            logits.append(tiny.forward(model, tiny.prompt(2, 1), cache))
        runs.append(torch.cat(logits))
    assert torch.allclose(*runs, atol=1e-4)


def test_crop():
    _, cache = filled()
    held = contents(cache)
    cache.crop(-5)
    assert int(cache.get_seq_length()) == 196
    assert_holds(cache, [(k[:, :, :196], v[:, :, :196]) for k, v in held])
    with pytest.raises(ValueError, match="packed tile"):
        cache.crop(100)
    cache.crop(6)
    assert_holds(cache, [(k[:, :, :6], v[:, :, :6]) for k, v in held])


def test_crop_with_layers_that_stay_dense():
    model, logits = tiny.model("llama"), []
    for cropped in (True, False):
        cache = KVarNCache(model.config, SMALL, max_cache_len=300, skip_layers=[1])
        tiny.forward(model, tiny.prompt(1, 150), cache)
        if cropped:
            tiny.forward(model, tiny.prompt(1, 4, seed=1), cache)
            cache.crop(-4)
        logits.append(tiny.forward(model, tiny.prompt(1, 4, seed=2), cache))
    assert torch.equal(*logits)


def test_a_window_that_moved_cannot_be_cropped():
    model = tiny.model("gemma3")
    cache = KVarNCache(model.config, SMALL, max_cache_len=300)
    tiny.forward(model, tiny.prompt(1, 20), cache)
    with pytest.raises(ValueError, match="max_cache_len must be None to crop"):
        cache.crop(-2)
    assert {int(layer.get_seq_length()) for layer in cache.layers} == {20}


def test_saved_and_loaded_as_a_cache_that_grows(tmp_path):
    _, cache = filled()
    cache.save(tmp_path / "cache.safetensors")
    assert_holds(KVarNCache.load(tmp_path / "cache.safetensors"), contents(cache))


def test_saved_with_layers_that_stay_dense(tmp_path):
    model, cache = filled(skip_layers=[0])
    cache.save(tmp_path / "cache.safetensors")
    loaded, token = KVarNCache.load(tmp_path / "cache.safetensors"), tiny.prompt(2, 1)
    assert torch.allclose(tiny.forward(model, token, loaded), tiny.forward(model, token, cache), atol=1e-4)
    window = KVarNCache(tiny.model("gemma3").config, SMALL, max_cache_len=300)
    with pytest.raises(ValueError, match="without max_cache_len, sliding-window layers, got a StaticSlidingWindow"):
        window.save(tmp_path / "window.safetensors")


@pytest.mark.parametrize("then", ["step", "crop", "prompt", "reset"])
def test_keys_kept_from_an_older_step_change_nothing(then):
    """Nor do the caller's own tokens, changed before attention."""
    model, cache = filled()
    batch, heads, _, dim = cache.layers[0].keys.shape
    first, second = torch.randn(2, batch, heads, 1, dim)
    kept = [layer.update(first, first, lazy=True) for layer in cache.layers]
    if then == "step":
        for layer in cache.layers:
            layer.update(second, second, lazy=True)
    elif then == "crop":
        cache.crop(-1)
    elif then == "prompt":
        cache.layers[0].update(*torch.randn(2, batch, heads, 3, dim))
    else:
        cache.reset()
        tiny.forward(model, tiny.prompt(batch, 40), cache)
    held = contents(cache)
    first.zero_()
    torch.nn.functional.scaled_dot_product_attention(torch.randn(batch, heads, 1, dim), *kept[0])
    assert_holds(cache, held)


@pytest.mark.parametrize(
    ("operation", "snapshots"),
    [
        (repr, 0),
        (lambda cache: cache.report(), 0),
        (lambda cache: cache.memory_footprint(), 0),
        (lambda cache: cache.crop(-2), 1),
        (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), 1),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), 1),
        (lambda cache: cache.batch_repeat_interleave(2), 1),
    ],
    ids=["repr", "report", "bytes", "crop", "reorder", "select", "repeat"],
)
def test_every_layer_is_asked_once_what_it_holds(operation, snapshots, monkeypatch):
    """A snapshot waits for the device and copies the dense tokens; lengths alone are read for all layers together."""
    _, cache = filled()
    asked, read = [], []
    snapshot, lengths = StaticKVarNLayer.snapshot, SharedStep.lengths
    monkeypatch.setattr(StaticKVarNLayer, "snapshot", lambda layer: asked.append(layer.index) or snapshot(layer))
    monkeypatch.setattr(SharedStep, "lengths", lambda shared: read.append(1) or lengths(shared))
    operation(cache)
    assert asked == [0, 1] * snapshots
    assert len(read) <= 1
