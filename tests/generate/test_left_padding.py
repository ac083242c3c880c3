"""A row of a left-padded batch is stored as well as the same prompt alone."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from kvarn_hf import KVarNCache, KVarNConfig
from tests import models_tiny as tiny

CONFIG = KVarNConfig(tile_size=64, sink_length=16, residual_length=16)
METHODS = ("kvarn", "published", "hadamard", "rtn")


def prefilled(inputs, config=CONFIG, name="llama", sizes=None):
    """A KVarNCache and a DynamicCache after ``generate()``'s own prefill of those inputs, and one new token."""
    model = tiny.model(name)
    caches = KVarNCache(model.config, config), DynamicCache(config=model.config)
    for cache in caches:
        options = {"prefill_chunk_size": sizes} if sizes else {}
        model.generate(**inputs, **{tiny.CACHE_NAME: cache}, max_new_tokens=1, do_sample=False, **options)
    return caches


def alone(inputs, row):
    """The same row without its padding."""
    ids = inputs["input_ids"][row][inputs["attention_mask"][row].bool()][None]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def errors(quantized, dense, row, start):
    """Squared error per packed token of one row that begins at ``start``, of the keys and values of every layer."""
    result = []
    for layer, other in zip(quantized.layers, dense.layers, strict=True):
        packed = layer.state.tail_start - CONFIG.sink_length - start
        for x, y in ((layer.keys, other.keys), (layer.values, other.values)):
            result.append(((x - y)[row, :, start:] ** 2).sum().item() / packed)
    return result


@pytest.fixture(scope="module")
def inputs():
    return tiny.left_padded(list(TestThroughGenerate.LENGTHS))


class TestThroughGenerate:
    LENGTHS = (400, 399, 336, 350, 272, 91, 30)  # no padding, 1, one tile, 50, two tiles, many, more than is packed

    @pytest.mark.parametrize("name", ["llama", "qwen3", "phi3"])
    def test_padding_is_found(self, inputs, name):
        quantized, _ = prefilled(inputs, name=name)
        for layer in quantized.layers:
            padding = layer.state.padding.length.tolist()
            assert padding[0] == 0
            assert padding[1] == 0  # a single token is no run, and is a sink like any other
            assert padding[2:] == [400 - n for n in self.LENGTHS[2:]]

    @pytest.mark.parametrize("row", [2, 4])
    def test_whole_tiles_of_padding_give_the_codes_of_the_row_alone(self, inputs, row):
        """In the first layer, whose keys and values do not depend on the batch."""
        quantized, _ = prefilled(inputs)
        single, _ = prefilled(alone(inputs, row))
        count = single.layers[0].state.count
        state, other = quantized.layers[0].state, single.layers[0].state
        assert torch.equal(state.prescale[row], other.prescale[0])
        for packed, packed_alone in zip(state.tiles.filled(), other.tiles.filled(), strict=True):
            for x, y in zip(packed, packed_alone, strict=True):
                assert torch.equal(x[row, :, -count:], y[0])
        assert torch.equal(state.dense.keys[row], other.dense.keys[0])  # sinks and tail

    @pytest.mark.parametrize("method", METHODS)
    def test_error_is_no_worse_than_alone(self, inputs, method):
        config = CONFIG.replace(method=method)
        quantized, dense = prefilled(inputs, config)
        for row, length in enumerate(self.LENGTHS[:5]):
            by_itself = errors(*prefilled(alone(inputs, row), config), 0, 0)
            for x, y in zip(errors(quantized, dense, row, 400 - length), by_itself, strict=True):
                assert x < 1.03 * y  # the tiles of a padded row begin elsewhere
        # Of this row, which alone is short enough to stay dense, eleven tokens are packed here.
        typical = errors(*prefilled(alone(inputs, 0), config), 0, 0)
        assert all(x < 1.25 * y for x, y in zip(errors(quantized, dense, 5, 309), typical, strict=True))

    @pytest.mark.parametrize("row", range(1, 6))
    def test_sinks_of_every_row_are_exact(self, inputs, row):
        quantized, dense = prefilled(inputs)
        padding = 400 - self.LENGTHS[row]
        exact = 16 + (padding if padding > 1 else 0)
        for layer, other in zip(quantized.layers, dense.layers, strict=True):
            assert torch.equal(layer.keys[row, :, :exact], other.keys[row, :, :exact])
            assert torch.equal(layer.values[row, :, :exact], other.values[row, :, :exact])

    @pytest.mark.parametrize("size", [1, 37])
    def test_chunked_prefill_packs_as_much(self, size):
        inputs = tiny.left_padded([200, 136, 150, 60, 10])
        whole, _ = prefilled(inputs)
        pieces, _ = prefilled(inputs, sizes=size)
        for layer, other in zip(whole.layers, pieces.layers, strict=True):
            assert layer.state.count == other.state.count
            assert layer.memory_footprint() == other.memory_footprint()

    def test_logits_are_as_close_as_alone(self, inputs):
        """Divergence of the next tokens' distributions from the dense cache's, padded and alone."""
        model, answer = tiny.model("llama"), tiny.prompt(len(self.LENGTHS), 1, seed=3)
        quantized, dense = prefilled(inputs)
        mask = torch.cat([inputs["attention_mask"], torch.ones(len(self.LENGTHS), 1, dtype=torch.long)], 1)
        positions = (mask.cumsum(1) - 1)[:, -1:]

        def divergence(caches, tokens, **kwargs):
            p, q = (tiny.forward(model, tokens, c, **kwargs)[:, -1].log_softmax(-1) for c in caches[::-1])
            return (p.exp() * (p - q)).sum(-1)

        padded = divergence((quantized, dense), answer, attention_mask=mask, position_ids=positions)
        by_itself = torch.cat(
            [divergence(prefilled(alone(inputs, row)), answer[row : row + 1]) for row in range(len(self.LENGTHS))]
        )
        assert padded.mean() < 1.5 * by_itself.mean() + 1e-6
