"""What ``KVarNCache(max_cache_len=N)`` refuses, and that a failure loses nothing."""

from __future__ import annotations

import copy

import pytest
import torch

from kvarn_hf import KVarNCache, KVarNConfig
from kvarn_hf.layers.fixed import StaticKVarNLayer
from kvarn_hf.ops import steps as static
from kvarn_hf.state.layer_state import LayerState
from tests import models_tiny as tiny
from tests.layers.common import SMALL, assert_holds, contents, filled, generate, with_attention


def test_no_room_is_one_clear_error_and_loses_nothing():
    model, cache = filled()
    held = contents(cache)
    with pytest.raises(ValueError, match=r"max_cache_len must be .* got 300 for 301 tokens"), torch.no_grad():
        tiny.forward(model, tiny.prompt(2, 100), cache)
    assert_holds(cache, held)
    ids = torch.cat([tiny.prompt(2, 201), tiny.prompt(2, 1)], 1)
    with pytest.raises(ValueError, match="max_cache_len must be"):
        generate(model, cache, ids, 110)
    assert int(cache.get_seq_length()) == 300
    assert_holds(cache, [(k, v) for k, v in contents(cache)])
    for (keys, _), (other, _) in zip(contents(cache), held, strict=True):
        # What was dense then may be packed now; what was packed is as it was.
        assert torch.equal(keys[:, :, :136], other[:, :, :136])


@pytest.mark.parametrize("skipped", [[0], [1], [0, 1]])
@pytest.mark.parametrize("tokens", [1, 20])
def test_no_room_with_layers_that_stay_dense(skipped, tokens):
    model = tiny.model("llama")
    cache = KVarNCache(model.config, SMALL, max_cache_len=100, skip_layers=skipped)
    tiny.forward(model, tiny.prompt(1, 100), cache)
    with pytest.raises(ValueError, match="max_cache_len must be"):
        tiny.forward(model, tiny.prompt(1, tokens), cache)
    assert [int(layer.get_seq_length()) for layer in cache.layers] == [100, 100]


def test_a_failed_prefill_loses_nothing(monkeypatch):
    model, cache = filled(100)
    held = contents(cache)

    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(LayerState, "appended", fail)
    with pytest.raises(torch.OutOfMemoryError), torch.no_grad():
        tiny.forward(model, tiny.prompt(2, 80), cache)
    monkeypatch.undo()
    assert_holds(cache, held)


@pytest.mark.parametrize("length", [100, 143, 144])
def test_a_failed_step_loses_nothing(length):
    """Also when the layers before have packed a tile in the same step."""
    _, cache = filled(length)
    held = contents(cache)
    batch, heads, _, dim = held[0][0].shape
    new = torch.zeros(batch, heads, 1, dim)
    cache.update(new, new, 0)
    with pytest.raises(ValueError, match="dtype"):
        cache.update(new.half(), new, 1)
    assert [int(layer.get_seq_length()) for layer in cache.layers] == [length + 1] * 2
    assert_holds(cache, held)


# A model with linear attention changes its states in place before the cache hears of a single token.
@pytest.mark.parametrize(
    ("name", "tokens"), [("gemma3", 30), ("gemma3", 1), ("gpt_oss", 30), ("gpt_oss", 1), ("qwen3_next", 30)]
)
def test_a_failed_pass_loses_nothing_in_other_kinds_of_layers(name, tokens, monkeypatch):
    model, logits = tiny.model(name), []
    for fails in (True, False):
        cache = KVarNCache(model.config, SMALL, max_cache_len=300)
        tiny.forward(model, tiny.prompt(1, 50), cache)
        if fails:
            layer = next(layer for layer in cache.layers if isinstance(layer, StaticKVarNLayer))

            def fail(*args, **kwargs):
                raise torch.OutOfMemoryError("no memory")

            with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
                patch.setattr(layer, "update", fail)
                tiny.forward(model, tiny.prompt(1, tokens), cache)
        logits.append(tiny.forward(model, tiny.prompt(1, 3, seed=1), cache))
    assert torch.equal(*logits)


def test_keys_of_a_step_that_failed_change_nothing():
    _, cache = filled()
    held = contents(cache)
    batch, heads, _, dim = held[0][0].shape
    token = torch.randn(batch, heads, 1, dim)

    class Attention(torch.nn.Module):
        config = cache._shared.model_config

        def forward(self):
            return cache.update(token, token, 0)

    kept = Attention()()
    assert type(kept[0]).__name__ == "LazyStates"
    with pytest.raises(ValueError, match="key_states"):
        cache.update(token.half(), token, 1)
    torch.nn.functional.scaled_dot_product_attention(torch.randn(batch, heads, 1, dim), *kept)
    assert_holds(cache, held)


@pytest.mark.parametrize("layer", [0, 1])
def test_an_interrupt_while_tiles_are_packed(layer, monkeypatch):
    """A prompt after whose next token a tile is due; the interrupt comes when some layers may have packed theirs."""
    model, plain = tiny.model("llama"), KVarNCache(tiny.model("llama").config, SMALL)
    due = SMALL.sink_length + SMALL.residual_length + 2 * SMALL.tile_size
    cache, token = KVarNCache(model.config, SMALL, max_cache_len=300), tiny.prompt(1, 1)
    for other in (cache, plain):
        tiny.forward(model, tiny.prompt(1, due - 1), other)
        tiny.forward(model, token, other)
    held, put, calls = contents(cache), static.put, iter(range(9))

    def interrupted(*args):
        if next(calls) == layer:
            raise KeyboardInterrupt
        put(*args)

    monkeypatch.setattr("kvarn_hf.ops.steps.put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiny.forward(model, token, cache)
    monkeypatch.undo()
    assert next(calls) > layer and [int(x.get_seq_length()) for x in cache.layers] == [due, due]
    assert_holds(cache, held)
    for other in (cache, plain):
        tiny.forward(model, token, other)
        tiny.forward(model, token, other)
    assert_holds(cache, contents(plain))


def test_a_step_refuses_what_is_not_like_the_tokens_held():
    _, cache = filled()
    held = contents(cache)
    layer = cache.layers[0]
    batch, heads, _, dim = layer.keys.shape
    new = torch.zeros(batch, heads, 1, dim)
    for keys, message in (
        (new[:1], "shape"),
        (new[..., :8], "shape"),
        (new.half(), "dtype"),
        (new.to("meta"), "must be on"),
    ):
        with pytest.raises(ValueError, match=f"key_states must .*{message}|key_states {message}"):
            cache.update(keys, new, 0)
    assert_holds(cache, held)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_cache_len": 0}, "max_cache_len must be a positive integer or None, got 0"),
        ({"max_cache_len": 2.5}, "max_cache_len must be a positive integer or None, got 2.5"),
        ({"max_cache_len": 100, "config": None}, "max_cache_len needs the model's config"),
        ({"max_cache_len": 100, "fused": False}, "fused must be True with max_cache_len"),
        ({"max_cache_len": 100, "monitor": True}, "monitor must be False with max_cache_len"),
        ({"max_cache_len": 100, "kvarn": KVarNConfig(check_finite=True)}, "check_finite must be False"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        KVarNCache(**{"config": tiny.model("llama").config, **arguments})


def test_no_lengths_on_the_meta_device():
    model = copy.deepcopy(tiny.model("llama")).to("meta")
    with pytest.raises(ValueError, match=r"max_cache_len must be None .* meta"):
        tiny.forward(model, tiny.prompt(1, 20), KVarNCache(model.config, SMALL, max_cache_len=300))


def test_a_mask_that_ends_before_the_room_does_is_refused():
    model = with_attention("llama", "kvarn")
    cache = KVarNCache(model.config, SMALL, max_cache_len=300)
    tiny.forward(model, tiny.prompt(1, 150), cache)
    with pytest.raises(RuntimeError, match="size"):
        tiny.forward(model, tiny.prompt(1, 1), cache, attention_mask=torch.ones(1, 1, 1, 140, dtype=torch.bool))


def test_flash_attention_is_refused():
    """It would attend to what lies behind the tokens."""
    config = copy.deepcopy(tiny.model("llama").config)
    config._attn_implementation_internal = "flash_attention_2"
    new = torch.zeros(1, 2, 20, 16)
    with pytest.raises(ValueError, match=r"max_cache_len needs attn_implementation .* got 'flash_attention_2'"):
        KVarNCache(config, SMALL, max_cache_len=300).update(new, new, 0)
