"""``KVarNCache(max_cache_len=N)``: what it holds, says and refuses, eagerly and compiled."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, DynamicCache, JetMoeConfig

from kvarn_hf import KVarNCache, KVarNConfig
from kvarn_hf.layers.fixed import StaticKVarNLayer
from kvarn_hf.ops import steps as static
from tests import models_tiny as tiny
from tests.generate import test_generate as modes

SMALL = KVarNConfig(tile_size=64, sink_length=8, residual_length=8)


def generate(model, cache, ids, new, mask=None):
    return model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        max_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **{tiny.CACHE_NAME: cache},
    )


def with_attention(name, attention):
    model = copy.deepcopy(tiny.model(name))
    model.set_attn_implementation(attention)
    return model


def assert_same(run, expected, exact=True):
    assert torch.equal(run.sequences, expected.sequences)
    logits, other = torch.stack(run.logits), torch.stack(expected.logits)
    assert torch.equal(logits, other) if exact else torch.allclose(logits, other, atol=1e-2)


@pytest.mark.parametrize("attention", ["sdpa", "kvarn", "eager"])
@pytest.mark.parametrize("length", [1, 20, 190])
def test_the_same_as_a_cache_that_grows(attention, length):
    model = with_attention("llama", attention)
    ids = tiny.prompt(1, length)
    cache, plain = KVarNCache(model.config, SMALL, max_cache_len=length + 150), KVarNCache(model.config, SMALL)
    assert_same(generate(model, cache, ids, 150), generate(model, plain, ids, 150), exact=attention != "eager")
    assert cache.is_compileable and not plain.is_compileable
    assert int(cache.get_seq_length()) == length + 149
    for layer, other in zip(cache.layers, plain.layers, strict=True):
        assert layer.state.count == other.state.count
        if attention != "eager":  # sums over more keys are other sums
            assert torch.equal(layer.keys, other.keys)
            assert torch.equal(layer.values, other.values)


@pytest.mark.parametrize(
    "name", ["qwen3", "phi3", "gpt2", "gpt_neox", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_next"]
)
def test_every_kind_of_model(name):
    model = with_attention(name, "kvarn")
    ids = tiny.prompt(1, 100)
    run = generate(model, KVarNCache(model.config, SMALL, max_cache_len=200), ids, 60)
    expected = generate(model, KVarNCache(model.config, SMALL), ids, 60)
    assert_same(run, expected, exact=False)


def test_left_padding():
    model = tiny.model("llama")
    batch = tiny.left_padded([190, 60, 10])
    inputs = batch["input_ids"], 150, batch["attention_mask"]
    cache = KVarNCache(model.config, SMALL, max_cache_len=400)
    assert_same(generate(model, cache, *inputs), generate(model, KVarNCache(model.config, SMALL), *inputs))


@pytest.mark.parametrize(
    ("name", "attention", "lengths", "steps"),
    [
        *(("llama", attention, (30, 190), 140) for attention in ("sdpa", "kvarn", "eager")),
        ("qwen3_next", "sdpa", (140, 200), 12),  # linear attention
    ],
)
def test_compiled_once_for_all_flushes_and_prompts(name, attention, lengths, steps):
    model = with_attention(name, attention)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    cache, plain = KVarNCache(model.config, SMALL, max_cache_len=400), KVarNCache(model.config, SMALL)
    with torch.no_grad():
        for length in lengths:
            tokens = []
            for held in (cache, plain):
                held.reset()
                tokens.append(tiny.forward(model, tiny.prompt(1, length), held)[:, -1:].argmax(-1))
            token = tokens[0]
            assert torch.equal(*tokens)
            for _ in range(steps):
                logits = compiled(input_ids=token, **{tiny.CACHE_NAME: cache}).logits
                expected = tiny.forward(model, token, plain)
                assert torch.allclose(logits, expected, atol=5e-2 if attention == "eager" else 1e-4)
                token = expected[:, -1:].argmax(-1)
            assert cache.report()["tiles"] == plain.report()["tiles"] >= 2
    assert counters["stats"]["unique_graphs"] == 1


def test_turns_and_chunks():
    model = tiny.model("llama")
    ids = tiny.prompt(1, 300)
    cache, plain = KVarNCache(model.config, SMALL, max_cache_len=500), KVarNCache(model.config, SMALL)
    with torch.no_grad():
        for part in ids.split([100, 1, 1, 90, 2, 1, 105], 1):
            logits = tiny.forward(model, part, cache)
            assert torch.allclose(logits, tiny.forward(model, part, plain), atol=1e-5)
    for layer, other in zip(cache.layers, plain.layers, strict=True):
        assert torch.equal(layer.keys, other.keys)


@pytest.mark.parametrize("mode", [modes.prefix_copy, modes.multi_turn, modes.prompt_lookup, modes.assisted])
def test_modes(mode):
    model = tiny.model("llama")
    torch.manual_seed(0)
    run = mode(model, lambda: KVarNCache(model.config, SMALL, max_cache_len=300), 190, 20)
    torch.manual_seed(0)
    expected = mode(model, lambda: KVarNCache(model.config, SMALL), 190, 20)
    assert torch.equal(run.tokens, expected.tokens)


def filled(length=200, **options):
    model = tiny.model("llama")
    cache = KVarNCache(model.config, SMALL, max_cache_len=300, **options)
    with torch.no_grad():
        tiny.forward(model, tiny.prompt(2, length), cache)
        tiny.forward(model, tiny.prompt(2, 1), cache)
    return model, cache


def contents(cache):
    return [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]


def assert_holds(cache, expected):
    for (keys, values), (other_keys, other_values) in zip(contents(cache), expected, strict=True):
        assert torch.equal(keys, other_keys)
        assert torch.equal(values, other_values)


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


def test_rows_that_are_not_there_are_refused():
    _, cache = filled()
    before = contents(cache)
    with pytest.raises(ValueError, match=r"indices must hold rows from -2 to 1, got \[2\]"):
        cache.batch_select_indices([2])
    assert_holds(cache, before)


def test_rows_move_together():
    _, cache = filled()
    held = contents(cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert_holds(cache, [(k.flip(0), v.flip(0)) for k, v in held])
    cache.batch_select_indices(torch.tensor([1]))
    assert_holds(cache, [(k[:1], v[:1]) for k, v in held])
    cache.batch_repeat_interleave(3)
    assert_holds(cache, [(k[:1].expand(3, -1, -1, -1), v[:1].expand(3, -1, -1, -1)) for k, v in held])


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


def test_saved_and_loaded_as_a_cache_that_grows(tmp_path):
    _, cache = filled()
    cache.save(tmp_path / "cache.safetensors")
    assert_holds(KVarNCache.load(tmp_path / "cache.safetensors"), contents(cache))


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


def test_a_failed_prefill_loses_nothing(monkeypatch):
    model, cache = filled(100)
    held = contents(cache)

    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(type(cache.layers[1].state), "appended", fail)
    with pytest.raises(torch.OutOfMemoryError), torch.no_grad():
        tiny.forward(model, tiny.prompt(2, 80), cache)
    monkeypatch.undo()
    assert_holds(cache, held)


def test_memory_is_allocated_once():
    model = tiny.model("llama")
    cache = KVarNCache(model.config, SMALL, max_cache_len=300)
    assert cache.memory_footprint() == 0
    with torch.no_grad():
        tiny.forward(model, tiny.prompt(1, 10), cache)
        held, addresses = cache.memory_footprint(), [layer.storage.data_ptr() for layer in cache.layers]
        for _ in range(250):
            tiny.forward(model, tiny.prompt(1, 1), cache)
        cache.reset()
        assert cache.report()["ratio"] == 1.0  # of nothing
        tiny.forward(model, tiny.prompt(1, 200), cache)
    assert cache.memory_footprint() == held == sum(layer.storage.nbytes for layer in cache.layers)
    assert addresses == [layer.storage.data_ptr() for layer in cache.layers]


def test_another_batch_and_dtype_after_a_reset():
    cache = KVarNCache(tiny.model("llama").config, SMALL, max_cache_len=300)
    for rows, dtype in ((1, torch.float32), (2, torch.bfloat16), (2, torch.float32)):
        model = copy.deepcopy(tiny.model("llama")).to(dtype)
        cache.reset()
        plain = KVarNCache(model.config, SMALL)
        for held in (cache, plain):
            torch.manual_seed(0)
            for tokens in (150, 1, 1):
                tiny.forward(model, torch.randint(1, 100, (rows, tokens)), held)
        assert_holds(cache, contents(plain))


def test_early_initialization():
    model = tiny.model("llama")
    cache = KVarNCache(model.config, SMALL, max_cache_len=300)
    heads, dim = model.config.num_key_value_heads, model.config.hidden_size // model.config.num_attention_heads
    cache.early_initialization(1, heads, dim, torch.float32, torch.device("cpu"))
    assert cache.memory_footprint() > 0 and int(cache.get_seq_length()) == 0
    ids = tiny.prompt(1, 20)
    assert_same(generate(model, cache, ids, 80), generate(model, KVarNCache(model.config, SMALL), ids, 80))


def test_layers_that_stay_dense():
    model = tiny.model("llama")
    ids = tiny.prompt(1, 190)
    cache = KVarNCache(model.config, SMALL, max_cache_len=300, skip_layers=[0])
    expected = generate(model, KVarNCache(model.config, SMALL, skip_layers=[0]), ids, 60)
    assert_same(generate(model, cache, ids, 60), expected, exact=False)


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


def test_inside_and_outside_of_inference_mode():
    model = tiny.model("llama")
    cache, plain = KVarNCache(model.config, SMALL, max_cache_len=300), KVarNCache(model.config, SMALL)
    for held in (cache, plain):
        with torch.inference_mode():
            tiny.forward(model, tiny.prompt(1, 100), held)
        for _ in range(60):
            logits = tiny.forward(model, tiny.prompt(1, 1), held)
        with torch.inference_mode():
            tiny.forward(model, tiny.prompt(1, 1), held)
    assert torch.equal(cache.layers[1].keys, plain.layers[1].keys)
    assert logits.isfinite().all()


def test_other_dtypes_than_the_caches_are_read_dense():
    model = copy.deepcopy(tiny.model("llama")).bfloat16()
    model.set_attn_implementation("kvarn")
    cache = KVarNCache(model.config, SMALL, max_cache_len=300)
    with torch.autocast("cpu", torch.bfloat16):
        tiny.forward(model, tiny.prompt(1, 150), cache)
        for _ in range(3):
            assert tiny.forward(model, tiny.prompt(1, 1), cache).isfinite().all()


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


@pytest.mark.parametrize("skipped", [[0], [1], [0, 1]])
@pytest.mark.parametrize("tokens", [1, 20])
def test_no_room_with_layers_that_stay_dense(skipped, tokens):
    model = tiny.model("llama")
    cache = KVarNCache(model.config, SMALL, max_cache_len=100, skip_layers=skipped)
    tiny.forward(model, tiny.prompt(1, 100), cache)
    with pytest.raises(ValueError, match="max_cache_len must be"):
        tiny.forward(model, tiny.prompt(1, tokens), cache)
    assert [int(layer.get_seq_length()) for layer in cache.layers] == [100, 100]


def test_no_room_after_compiled_steps_and_without_a_mask_to_build():
    model = tiny.model("llama")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    cache = KVarNCache(model.config, SMALL, max_cache_len=20)
    tiny.forward(model, tiny.prompt(1, 10), cache)
    tiny.forward(model, tiny.prompt(1, 1), cache)
    with torch.no_grad():
        for _ in range(9):
            compiled(input_ids=tiny.prompt(1, 1), **{tiny.CACHE_NAME: cache})
    for mask in (None, torch.ones(1, 1, 1, 20, dtype=torch.bool)):
        with pytest.raises(ValueError, match="max_cache_len must be"):
            tiny.forward(model, tiny.prompt(1, 1), cache, attention_mask=mask)


def test_copies_made_in_inference_mode():
    model, cache = filled()
    with torch.inference_mode():
        copies = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    expected = tiny.forward(model, tiny.prompt(2, 1), cache)
    for copied in copies:
        assert torch.equal(tiny.forward(model, tiny.prompt(2, 1), copied), expected)


@pytest.mark.parametrize("skipped", [[], [0], [1]])
def test_a_prompt_of_one_token_after_early_initialization(skipped):
    model = tiny.model("llama")
    cache = KVarNCache(model.config, SMALL, max_cache_len=100, skip_layers=skipped)
    cache.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
    plain = KVarNCache(model.config, SMALL, skip_layers=skipped)
    for i in range(90):
        token = tiny.prompt(2, 1, seed=i)
        assert torch.allclose(tiny.forward(model, token, cache), tiny.forward(model, token, plain), atol=1e-4)


def test_no_lengths_on_the_meta_device():
    model = copy.deepcopy(tiny.model("llama")).to("meta")
    with pytest.raises(ValueError, match=r"max_cache_len must be None .* meta"):
        tiny.forward(model, tiny.prompt(1, 20), KVarNCache(model.config, SMALL, max_cache_len=300))


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


def test_a_compiled_model_that_changes_keys_before_attention():
    sizes = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "kv_channels": 32, "intermediate_size": 64}
    config = JetMoeConfig(**sizes, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    cache, plain = KVarNCache(config, SMALL, max_cache_len=300), KVarNCache(config, SMALL)
    with torch.no_grad():
        for held in (cache, plain):
            tiny.forward(model, tiny.prompt(1, 140), held)
        for i in range(8):
            token = tiny.prompt(1, 1, seed=i)
            logits = compiled(input_ids=token, **{tiny.CACHE_NAME: cache}).logits
            assert torch.allclose(logits, tiny.forward(model, token, plain), atol=1e-4)


def test_a_mask_that_ends_before_the_room_does_is_refused():
    model = with_attention("llama", "kvarn")
    cache = KVarNCache(model.config, SMALL, max_cache_len=300)
    tiny.forward(model, tiny.prompt(1, 150), cache)
    with pytest.raises(RuntimeError, match="size"):
        tiny.forward(model, tiny.prompt(1, 1), cache, attention_mask=torch.ones(1, 1, 1, 140, dtype=torch.bool))


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


def test_copies_and_new_caches_need_no_new_compilation():
    model = tiny.model("llama")
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        _, cache = filled()
        for held in (cache, copy.deepcopy(cache)):
            with torch.no_grad():
                compiled(input_ids=tiny.prompt(2, 1), **{tiny.CACHE_NAME: held})
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("attention", ["sdpa", "kvarn"])
def test_compiled_steps_ask_each_layer_little(attention):
    """Whatever they ask a layer for, they compare at every step, in every layer."""
    model = with_attention("llama", attention)
    torch._dynamo.reset()
    cache = KVarNCache(model.config, SMALL, max_cache_len=300)
    tiny.forward(model, tiny.prompt(1, 20), cache)
    with torch.no_grad():
        torch.compile(model, backend="aot_eager", fullgraph=True)(
            input_ids=tiny.prompt(1, 1), **{tiny.CACHE_NAME: cache}
        )
    (entry,) = torch._dynamo.eval_frame._debug_get_cache_entry_list(type(model).forward.__code__)
    asked = set(re.findall(r"\.layers\[1\]\.(\w+)", str(entry.guard_manager)))
    assert asked == {"form"}


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "qwen3_next"])
def test_the_cache_answers_for_its_layers(name):
    config = tiny.model(name).config
    for cache in (KVarNCache(config, SMALL, max_cache_len=300), KVarNCache(config, SMALL), KVarNCache()):
        for changed in (False, True):
            if changed:  # layers with linear attention cannot be compiled from then on
                cache.activate_past_recording()
            for answer in ("is_sliding", "is_compileable"):
                assert getattr(cache, answer) == getattr(DynamicCache, answer).fget(cache)


@pytest.mark.parametrize(("rows", "dtype", "message"), [(2, None, "shape"), (1, torch.float64, "dtype")])
def test_compiled_steps_refuse_other_tokens(rows, dtype, message):
    model = tiny.model("llama")
    torch._dynamo.reset()
    cache = KVarNCache(model.config, SMALL, max_cache_len=300)
    tiny.forward(model, tiny.prompt(1, 20), cache)
    other = copy.deepcopy(model).to(dtype) if dtype else model
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(Exception, match=f"key_states must have {message} .* like the tokens held"):
        compiled(input_ids=tiny.prompt(rows, 1), **{tiny.CACHE_NAME: cache})
    assert int(cache.get_seq_length()) == 20


@pytest.mark.parametrize("attention", ["sdpa", "kvarn"])
@pytest.mark.parametrize("skipped", [[], [0]])
def test_prompts_through_a_compiled_model_too(attention, skipped):
    model = with_attention("llama", attention)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    cache = KVarNCache(model.config, SMALL, max_cache_len=300, skip_layers=skipped)
    plain = KVarNCache(model.config, SMALL, skip_layers=skipped)
    with torch.no_grad():
        for turn in range(2):
            for held in (cache, plain):
                held.reset()
            for tokens in (100, 1, 1, 60, 5, 1):
                ids = tiny.prompt(1, tokens, seed=tokens + turn)
                logits = compiled(input_ids=ids, **{tiny.CACHE_NAME: cache}).logits
                assert torch.allclose(logits, tiny.forward(model, ids, plain), atol=1e-4)
    torch._dynamo.reset()
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="only steps of one token can be compiled"):
        whole(input_ids=tiny.prompt(1, 20), **{tiny.CACHE_NAME: KVarNCache(model.config, SMALL, max_cache_len=300)})


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


def test_eager_attention_gets_the_token_as_compiled_attention_does(monkeypatch):
    """Without it, it would be another kernel to compile."""
    model, cache = filled()
    given, attend = [], static.attend
    monkeypatch.setattr(static, "attend", lambda query, keys, *rest: given.append(keys) or attend(query, keys, *rest))
    tiny.forward(model, tiny.prompt(2, 1), cache)
    assert [tuple(keys.shape) for keys in given] == [(2, 2, 1, 16)] * 2


def test_keys_of_a_step_that_failed_change_nothing():
    _, cache = filled()
    held = contents(cache)
    batch, heads, _, dim = held[0][0].shape
    token = torch.randn(batch, heads, 1, dim)

    class Attention(torch.nn.Module):
        config = cache._progress.model_config

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


def test_a_shallow_copy_of_a_layer_leaves_the_cache_as_it_is():
    model, cache = filled()
    other, token = copy.deepcopy(cache), tiny.prompt(2, 1)
    shared = copy.copy(cache.layers[0])
    assert shared.storage is cache.layers[0].storage
    for _ in range(2):
        assert torch.equal(tiny.forward(model, token, cache), tiny.forward(model, token, other))
    assert_holds(cache, contents(other))


def test_prompts_with_and_without_padding_in_turn_find_their_tables_again():
    """Compiled code relies on their addresses."""
    model = tiny.model("llama")
    cache, tables = KVarNCache(model.config, SMALL, max_cache_len=300), []
    for lengths in ([150, 150], [150, 130]) * 2:
        cache.reset()
        batch = tiny.left_padded(lengths)
        generate(model, cache, batch["input_ids"], 1, batch["attention_mask"])
        (group,) = cache._progress.groups["cpu"].values()
        assert group.members()[1] == [0, 1]
        tables.append(group.table.data_ptr())
    assert tables[:2] == tables[2:] and tables[0] != tables[1]


def test_flash_attention_is_refused():
    """It would attend to what lies behind the tokens."""
    config = copy.deepcopy(tiny.model("llama").config)
    config._attn_implementation_internal = "flash_attention_2"
    new = torch.zeros(1, 2, 20, 16)
    with pytest.raises(ValueError, match=r"max_cache_len needs attn_implementation .* got 'flash_attention_2'"):
        KVarNCache(config, SMALL, max_cache_len=300).update(new, new, 0)


@pytest.mark.parametrize(("told", "used"), [(None, "sdpa"), ("sdpa", "eager"), ("eager", "kvarn")])
def test_an_eager_step_asks_the_module_how_it_reads(told, used):
    model = with_attention("llama", used)
    config = copy.deepcopy(model.config)
    config._attn_implementation_internal = told
    cache, plain = KVarNCache(config, SMALL, max_cache_len=300), KVarNCache(model.config, SMALL)
    for tokens in (150, 1, 1):
        ids = tiny.prompt(1, tokens)
        assert torch.allclose(tiny.forward(model, ids, cache), tiny.forward(model, ids, plain), atol=1e-4)
    reads = cache.report()["reads"]
    assert (reads["fused"] > 0) == (used != "eager")
    assert (reads["dequantized"] > 0) == (used == "eager")
