"""The measurement itself, on a tiny model."""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvarn_hf import KVarNCache
from kvarn_hf.pseudo_decode import PseudoDecodeResult, _compare, dense_reference, pseudo_decode


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(97, (1, 600), generator=torch.Generator().manual_seed(1))


def test_a_dense_cache_differs_from_itself_by_nothing(model, ids):
    result = pseudo_decode(model, ids, lambda: DynamicCache(config=model.config))
    assert result.kl.shape == result.agrees.shape == (600 - 384,)
    assert result.max == 0 and result.top1 == 1


def test_running_side_by_side_equals_comparing_with_a_kept_reference(model, ids):
    kept = dense_reference(model, ids).compare(model, KVarNCache(model.config))
    beside = pseudo_decode(model, ids, lambda: KVarNCache(model.config))
    torch.testing.assert_close(beside.kl, kept.kl, rtol=0, atol=0)
    assert beside.mean > 0


def test_nothing_differs_before_the_first_tile_is_read(model, ids):
    result = pseudo_decode(model, ids, lambda: KVarNCache(model.config), skip=0)
    assert result.kl.shape == (600,)
    assert result.kl[:384].max() < 1e-6  # sinks and tail alone, exact
    assert result.kl[384:].max() > 1e-6


def test_one_block_reads_no_tile(model, ids):
    assert pseudo_decode(model, ids, lambda: KVarNCache(model.config), block=600).max < 1e-6


def test_the_divergence_is_that_of_the_distributions():
    p, q = (torch.randn(5, 97).log_softmax(-1) for _ in range(2))
    expected = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(_compare(p, q)[0], expected)


def test_statistics():
    result = PseudoDecodeResult(torch.tensor([0.0, 1.0, 2.0, 9.0]), torch.tensor([True, True, True, False]))
    assert (result.mean, result.median, result.max, result.top1) == (3.0, 1.5, 9.0, 0.75)
    assert result.p999 == pytest.approx(2.0 + 7.0 * 0.997)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((2, 600), {}, r"input_ids must have shape \[1, tokens\].*\[2, 600\]"),
        ((1, 384), {}, r"more than skip = 384 tokens, got \[1, 384\]"),
        ((1, 600), {"block": 0}, "block must be at least 1, got 0"),
        ((1, 600), {"skip": -1}, "skip must not be negative, got -1"),
    ],
)
def test_bad_input_is_named(model, shape, options, message):
    with pytest.raises(ValueError, match=message):
        pseudo_decode(model, torch.zeros(shape, dtype=torch.int64), lambda: KVarNCache(model.config), **options)
