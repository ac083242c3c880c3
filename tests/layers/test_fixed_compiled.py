"""``KVarNCache(max_cache_len=N)`` in compiled steps."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, JetMoeConfig

from kvarn_hf import KVarNCache
from kvarn_hf.ops import steps as static
from tests import models_tiny as tiny
from tests.layers.common import SMALL, filled, generate, with_attention


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
    assert asked == {"held_layout"}


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


def test_eager_attention_gets_the_token_as_compiled_attention_does(monkeypatch):
    """Without it, it would be another kernel to compile."""
    model, cache = filled()
    given, attend = [], static.attend
    monkeypatch.setattr(static, "attend", lambda query, keys, *rest: given.append(keys) or attend(query, keys, *rest))
    tiny.forward(model, tiny.prompt(2, 1), cache)
    assert [tuple(keys.shape) for keys in given] == [(2, 2, 1, 16)] * 2


def test_prompts_with_and_without_padding_in_turn_find_their_tables_again():
    """Compiled code relies on their addresses."""
    model = tiny.model("llama")
    cache, tables = KVarNCache(model.config, SMALL, max_cache_len=300), []
    for lengths in ([150, 150], [150, 130]) * 2:
        cache.reset()
        batch = tiny.left_padded(lengths)
        generate(model, cache, batch["input_ids"], 1, batch["attention_mask"])
        (group,) = cache._shared.groups["cpu"].values()
        assert group.members()[1] == [0, 1]
        tables.append(group.table.data_ptr())
    assert tables[:2] == tables[2:] and tables[0] != tables[1]


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
