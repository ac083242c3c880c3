"""The decode step as one CUDA graph, through plain ``generate()``."""

from __future__ import annotations

import copy
import threading
from functools import cache

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import LogitsProcessor, LogitsProcessorList

from kvarn_hf import KVarNCache, KVarNConfig, ops
from tests import models_tiny as tiny

pytestmark = pytest.mark.gpu

# In 8 bits: with few, a rounding of the model's own, which compiled code makes elsewhere, moves a code by a large step.
SMALL = KVarNConfig(8, 8, tile_size=64, sink_length=8, residual_length=8)


@cache
def model(name: str, attention: str):
    on_gpu = copy.deepcopy(tiny.model(name)).to("cuda", torch.float16)
    on_gpu.set_attn_implementation(attention)
    return on_gpu


@cache
def exact_model():
    """The same weights, computing in float32."""
    exact = copy.deepcopy(tiny.model("llama")).half().to("cuda", torch.float32)
    exact.set_attn_implementation("eager")
    return exact


class Forced(LogitsProcessor):
    """The same tokens in every run, whatever the model prefers: what one run chooses at a near tie, and all that
    follows from it, would say nothing about the caches."""

    def __call__(self, input_ids, scores):
        generator = torch.Generator(scores.device).manual_seed(input_ids.shape[1])
        return torch.rand(scores.shape, generator=generator, device=scores.device)


def generate(on_gpu, cache, ids, new, mask=None, **options):
    """The logits of every step, ``[new, rows, vocabulary]``, float32."""
    out = on_gpu.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        max_new_tokens=new,
        do_sample=False,
        logits_processor=LogitsProcessorList([Forced()]),
        return_dict_in_generate=True,
        output_logits=True,
        **{tiny.CACHE_NAME: cache},
        **options,
    )
    return torch.stack(out.logits).float()


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    counters.clear()
    for on_gpu in (model(*key) for key in (("llama", "sdpa"), ("llama", "kvarn"))):
        vars(on_gpu).pop("_compiled_call", None)


def assert_near(logits, on_gpu, ids, mask=None):
    """As near to the same cache in float32 as the plain cache is that does not compile, at every step; the same tokens
    come out on top, but for near ties."""
    plain, exact = (
        generate(each, KVarNCache(each.config, SMALL), ids, len(logits), mask) for each in (on_gpu, exact_model())
    )
    spread = exact.std(-1)
    error, plain_error = ((x - exact).abs().mean(-1) / spread for x in (logits, plain))
    assert error.mean() < 1.3 * plain_error.mean()
    assert error.max() < 2.5 * plain_error.max()
    first, second = exact.topk(2).values.unbind(-1)
    clear = first - second > 0.25 * spread
    assert clear.float().mean() > 0.4
    assert torch.equal(logits.argmax(-1)[clear], plain.argmax(-1)[clear])


@pytest.mark.parametrize("attention", ["sdpa", "kvarn"])
def test_compiled_once_over_flushes_and_prompts(attention):
    on_gpu = model("llama", attention)
    cache = KVarNCache(on_gpu.config, SMALL, max_cache_len=700)
    for length in (190, 77):
        cache.reset()
        ids = tiny.prompt(1, length).cuda()
        assert_near(generate(on_gpu, cache, ids, 400), on_gpu, ids)
        assert cache.report()["tokens"] == length + 399
        assert counters["stats"]["unique_graphs"] == 1
        assert not counters["graph_break"]
        assert not counters["inductor"]["cudagraph_skips"]


@pytest.mark.parametrize("attention", ["sdpa", "kvarn"])
def test_left_padded_batch(attention):
    on_gpu = model("llama", attention)
    batch = {k: v.cuda() for k, v in tiny.left_padded([190, 60, 10]).items()}
    cache = KVarNCache(on_gpu.config, SMALL, max_cache_len=500)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    assert_near(generate(on_gpu, cache, ids, 200, mask), on_gpu, ids, mask)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_by_hand(mode):
    on_gpu = model("llama", "kvarn")
    cache = KVarNCache(on_gpu.config, SMALL, max_cache_len=500)
    compiled = torch.compile(on_gpu, mode=mode, fullgraph=True)
    prompt = ids = tiny.prompt(1, 190).cuda()
    with torch.inference_mode():
        steps = [tiny.forward(on_gpu, ids, cache)[:, -1]]
        while len(steps) < 150:
            token = Forced()(ids, steps[-1]).argmax(-1, keepdim=True)
            steps.append(compiled(input_ids=token, **{tiny.CACHE_NAME: cache}).logits[:, -1].clone())
            ids = torch.cat([ids, token], 1)
    assert_near(torch.stack(steps).float(), on_gpu, prompt)
    assert counters["stats"]["unique_graphs"] == 1


def test_without_compiling():
    on_gpu = model("llama", "sdpa")
    ids = tiny.prompt(1, 190).cuda()
    cache = KVarNCache(on_gpu.config, SMALL, max_cache_len=400)
    assert_near(generate(on_gpu, cache, ids, 100, disable_compile=True), on_gpu, ids)
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


def test_a_step_waits_for_the_packing_kernel_only_when_a_tile_is_due():
    from kvarn_kernels.append import pack_kernel
    from kvarn_kernels.launch import begin, compiling

    on_gpu = model("llama", "kvarn")
    config = KVarNConfig(8, 3, tile_size=64, sink_length=8, residual_length=8)  # which no other test compiles
    cache, plain = KVarNCache(on_gpu.config, config, max_cache_len=300), KVarNCache(on_gpu.config, config)
    ids = tiny.prompt(1, 160).cuda()
    release = threading.Event()
    for held in (cache, plain):
        tiny.forward(on_gpu, ids[:, :142], held)
    begin(pack_kernel, lambda: release.wait(20))
    tiny.forward(on_gpu, ids[:, 142:143], cache)
    assert compiling(pack_kernel)
    release.set()
    for i in range(143, 160):
        tiny.forward(on_gpu, ids[:, i : i + 1], cache)
    assert cache.layers[0].all_counters[:, 1].tolist() == [2, 2]
    tiny.forward(on_gpu, ids[:, 142:], plain)
    for a, b in zip(*(ops.dense(held.layers[0].snapshot()) for held in (cache, plain)), strict=True):
        assert (a - b).float().norm() < 0.01 * b.float().norm()
