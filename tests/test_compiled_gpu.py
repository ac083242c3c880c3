"""The decode step as one CUDA graph, through plain ``generate()``."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch._dynamo.utils import counters

from kvarn_hf import KVarNCache, KVarNConfig
from tests import models_tiny as tiny

pytestmark = pytest.mark.gpu

# In 8 bits: with few, a rounding of the model's own, which compiled code makes elsewhere, moves a code by a large step.
SMALL = KVarNConfig(8, 8, tile_size=64, sink_length=8, residual_length=8)


@cache
def model(name: str, attention: str):
    on_gpu = copy.deepcopy(tiny.model(name)).to("cuda", torch.float16)
    on_gpu.set_attn_implementation(attention)
    return on_gpu


def generate(on_gpu, cache, ids, new, mask=None, **options):
    torch.manual_seed(0)
    return on_gpu.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        max_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **{tiny.CACHE_NAME: cache},
        **options,
    )


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    for on_gpu in (model(*key) for key in (("llama", "sdpa"), ("llama", "kvarn"))):
        vars(on_gpu).pop("_compiled_call", None)


def assert_near(run, expected):
    """Equal up to rounding as long as the tokens are the same; they are until a near tie."""
    for logits, other in zip(run.logits, expected.logits, strict=True):
        assert (logits - other).float().abs().mean() < 0.02 * other.float().std()
        if not torch.equal(logits.argmax(-1), other.argmax(-1)):
            top = other.float().topk(2).values
            assert (top[:, 0] - top[:, 1]).min() < 0.05 * other.float().std()
            return


@pytest.mark.parametrize("attention", ["sdpa", "kvarn"])
def test_compiled_once_over_flushes_and_prompts(attention):
    on_gpu = model("llama", attention)
    cache = KVarNCache(on_gpu.config, SMALL, max_cache_len=700)
    for length in (190, 77):
        cache.reset()
        ids = tiny.prompt(1, length).cuda()
        run = generate(on_gpu, cache, ids, 400)
        expected = generate(on_gpu, KVarNCache(on_gpu.config, SMALL), ids, 400)
        assert_near(run, expected)
        assert cache.report()["tokens"] == length + 399
        assert counters["stats"]["unique_graphs"] == 1
        assert not counters["graph_break"]
        assert not counters["inductor"]["cudagraph_skips"]


@pytest.mark.parametrize("attention", ["sdpa", "kvarn"])
def test_left_padded_batch(attention):
    on_gpu = model("llama", attention)
    batch = {k: v.cuda() for k, v in tiny.left_padded([190, 60, 10]).items()}
    cache = KVarNCache(on_gpu.config, SMALL, max_cache_len=500)
    run = generate(on_gpu, cache, batch["input_ids"], 200, batch["attention_mask"])
    expected = generate(on_gpu, KVarNCache(on_gpu.config, SMALL), batch["input_ids"], 200, batch["attention_mask"])
    assert_near(run, expected)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_by_hand(mode):
    on_gpu = model("llama", "kvarn")
    cache, plain = KVarNCache(on_gpu.config, SMALL, max_cache_len=500), KVarNCache(on_gpu.config, SMALL)
    compiled = torch.compile(on_gpu, mode=mode, fullgraph=True)
    with torch.inference_mode():
        for held in (cache, plain):
            tiny.forward(on_gpu, tiny.prompt(1, 190).cuda(), held)
        token = torch.tensor([[5]], device="cuda")
        for _ in range(150):
            logits = compiled(input_ids=token, **{tiny.CACHE_NAME: cache}).logits
            other = on_gpu(input_ids=token, **{tiny.CACHE_NAME: plain}).logits
            assert (logits - other).float().abs().mean() < 0.02 * other.float().std()
            token = other.argmax(-1)
    assert counters["stats"]["unique_graphs"] == 1


def test_without_compiling():
    on_gpu = model("llama", "sdpa")
    ids = tiny.prompt(1, 190).cuda()
    cache = KVarNCache(on_gpu.config, SMALL, max_cache_len=400)
    run = generate(on_gpu, cache, ids, 100, disable_compile=True)
    assert_near(run, generate(on_gpu, KVarNCache(on_gpu.config, SMALL), ids, 100))
    assert not counters["stats"]["unique_graphs"]
    assert cache.report()["reads"]["fused"] > 0


def test_kernels_are_compiled_ahead():
    """While the prompt is read and the step is traced, and for the arguments that the step then has."""
    from kvarn_kernels.append import pack_kernel
    from kvarn_kernels.attention_kernels import combine_kernel, split_kernel
    from kvarn_kernels.decode_attention import _PREPARED
    from kvarn_kernels.launch import finish

    def compiled() -> list[int]:
        return [len(kernel.device_caches[0][0]) for kernel in (pack_kernel, split_kernel, combine_kernel)]

    on_gpu = model("llama", "sdpa")
    config = KVarNConfig(3, 8, tile_size=64, sink_length=8, residual_length=8)  # which no other test compiles
    cache = KVarNCache(on_gpu.config, config, max_cache_len=300)
    ids = tiny.prompt(1, 190).cuda()
    finish(pack_kernel)  # what tests before this one began
    finish(split_kernel)
    before = compiled()
    with torch.inference_mode():
        tiny.forward(on_gpu, ids, cache)
        finish(pack_kernel)
        finish(split_kernel)
        ahead, prepared = compiled(), len(_PREPARED)
        generate(on_gpu, cache, torch.cat([ids, ids[:, :1]], 1), 2, disable_compile=True)
    assert [after - n for after, n in zip(ahead, before, strict=True)] == [1, 1, 1]
    assert (compiled(), len(_PREPARED)) == (ahead, prepared)
