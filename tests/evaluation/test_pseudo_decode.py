"""The measurement itself, on a tiny model."""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvarn_hf import KVarNCache
from kvarn_hf.evaluation.blocks import cache_argument
from kvarn_hf.evaluation.caches import cache_spec
from kvarn_hf.evaluation.pseudo_decode import PseudoDecodeResult, _compare, dense_reference, pseudo_decode
from kvarn_hf.evaluation.states import RecordingCache, joined, store_instead, watch


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
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(97, (2, 600), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def reference(model, ids):
    return dense_reference(model, ids)


def test_a_dense_cache_differs_from_itself_by_nothing(model, ids):
    result = pseudo_decode(model, ids, lambda: DynamicCache(config=model.config))
    assert result.kl.shape == result.agrees.shape == (2, 600 - 384)
    assert result.loss_change.shape == (2, 600 - 384 - 1)
    assert result.max == 0 and result.top1 == 1 and result.perplexity_ratio == 1


def test_texts_together_give_what_each_gives_alone(model, ids):
    together = pseudo_decode(model, ids, lambda: KVarNCache(model.config))
    alone = [pseudo_decode(model, ids[i : i + 1], lambda: KVarNCache(model.config)) for i in range(2)]
    for i in range(2):
        torch.testing.assert_close(together.rows(i).kl, alone[i].kl, rtol=1e-3, atol=1e-6)
    assert together.mean > 1e-4


def test_nothing_differs_before_the_first_tile_is_read(model, ids):
    result = pseudo_decode(model, ids, lambda: KVarNCache(model.config), skip=0)
    assert result.kl.shape == (2, 600)
    assert result.kl[:, :384].max() < 1e-6  # sinks and tail alone, exact
    assert result.kl[:, 384:].max() > 1e-6


def test_one_block_reads_no_tile(model, ids):
    assert pseudo_decode(model, ids, lambda: KVarNCache(model.config), block=600).max < 1e-6


@pytest.mark.parametrize("name", ["kvarn_k2v2_g128", "rtn_k2v2_g128"])
def test_a_static_history_is_the_dense_run_quantized(model, reference, name):
    def filled(history):
        with cache_spec(name).opened(model) as cache:
            result = reference.compare(model, cache, history)
        return cache, result

    accumulated, _ = filled("accumulated")
    static, result = filled("static")
    expected = cache_spec(name).make(model)
    for states in reference.states:
        for layer, (keys, values) in states.items():
            expected.update(keys, values, layer)
    assert result.mean > 1e-4
    for layer in range(2):
        torch.testing.assert_close(static.layers[layer].keys, expected.layers[layer].keys, rtol=0, atol=0)
    assert not torch.equal(accumulated.layers[1].keys, static.layers[1].keys)


def test_a_static_history_of_the_dense_cache_changes_nothing(model, reference):
    assert reference.compare(model, DynamicCache(config=model.config), "static").max < 1e-6


def test_single_tokens_read_the_history_that_blocks_read(model, reference):
    cache = KVarNCache(model.config)
    result = reference.compare(model, cache, block=1, first=384)
    assert cache.report()["reads"]["fused"] > 0  # it really read tiles token by token
    blocks = reference.compare(model, KVarNCache(model.config))
    # In single tokens a tile is packed as soon as it is due, up to a block earlier than in blocks.
    assert result.kl.shape == blocks.kl.shape
    assert 0.2 < result.mean / blocks.mean < 5


def test_the_divergence_is_that_of_the_distributions():
    p, q = (torch.randn(2, 5, 97).log_softmax(-1) for _ in range(2))
    targets = torch.randint(97, (2, 5))
    kl, agrees, loss_change = _compare(p, q, targets)
    torch.testing.assert_close(kl, torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1))
    assert torch.equal(agrees, p.argmax(-1) == q.argmax(-1))
    for row in range(2):
        losses = [torch.nn.functional.nll_loss(x[row], targets[row], reduction="none") for x in (q, p)]
        torch.testing.assert_close(loss_change[row], losses[0] - losses[1])
    assert _compare(p, q, targets[:, :4])[2].shape == (2, 4)  # the text's last token has no next one


def test_statistics():
    kl = torch.tensor([[0.0, 1.0, 2.0, 9.0]])
    result = PseudoDecodeResult(kl, torch.tensor([[True, True, True, False]]), torch.tensor([[0.5, 0.5, 0.5]]))
    assert (result.mean, result.median, result.max, result.top1) == (3.0, 1.5, 9.0, 0.75)
    assert result.p999 == pytest.approx(2.0 + 7.0 * 0.997)
    assert result.perplexity_ratio == pytest.approx(2.718281828**0.5)
    assert result.by_position(2) == [0.5, 5.5]
    assert result.by_position(3) == [1.0, 9.0]


def test_a_recording_cache_keeps_what_it_was_given(model, ids):
    cache = RecordingCache(model.config)
    with torch.inference_mode():
        for part in ids.split(128, 1):
            model(part, use_cache=True, **{cache_argument(model): cache})
    assert [states[0][0].shape[2] for states in cache.states] == [128] * 4 + [88]
    for layer in range(2):
        keys, values = joined(cache.states, layer)
        assert torch.equal(keys, cache.layers[layer].keys) and torch.equal(values, cache.layers[layer].values)


def test_what_attention_read_is_watched_and_what_is_stored_replaced():
    cache = DynamicCache()
    recorded = [{0: (torch.full((1, 1, 3, 8), 1.0), torch.full((1, 1, 3, 8), 2.0))}, {0: (torch.ones(1, 1, 1, 8),) * 2}]
    store_instead(cache, recorded)
    read = watch(cache)
    cache.update(torch.full((1, 1, 3, 8), 5.0), torch.full((1, 1, 3, 8), 6.0), 0)
    assert read[0][0].unique().tolist() == [5.0] and read[0][1].unique().tolist() == [6.0]  # nothing older
    cache.update(torch.full((1, 1, 1, 8), 7.0), torch.full((1, 1, 1, 8), 8.0), 0)
    assert read[0][0][0, 0, :, 0].tolist() == [1, 1, 1, 7]
    assert read[0][1][0, 0, :, 0].tolist() == [2, 2, 2, 8]
    assert cache.layers[0].keys[0, 0, :, 0].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((600,), {}, r"input_ids must have shape \[rows, tokens\].*\[600\]"),
        ((1, 384), {}, r"more than skip = 384 tokens, got \[1, 384\]"),
        ((1, 600), {"block": 0}, "block must be at least 1, got 0"),
        ((1, 600), {"skip": -1}, "skip must not be negative, got -1"),
    ],
)
def test_bad_input_is_named(model, shape, options, message):
    with pytest.raises(ValueError, match=message):
        pseudo_decode(model, torch.zeros(shape, dtype=torch.int64), lambda: KVarNCache(model.config), **options)


def test_bad_histories_are_named(model, reference):
    with pytest.raises(ValueError, match="history must be one of accumulated, static, got 'none'"):
        reference.compare(model, KVarNCache(model.config), "none")
    with pytest.raises(ValueError, match="block and first must be the dense run's when history is static, got 1"):
        reference.compare(model, KVarNCache(model.config), "static", block=1)
