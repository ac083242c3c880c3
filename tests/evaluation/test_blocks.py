"""Texts go through caches in blocks."""

import pytest
import torch
from transformers import DynamicCache

from kvarn_hf.evaluation.blocks import block_lengths, cache_argument, logits_in_blocks
from tests import models_tiny as tiny


def test_block_lengths():
    assert block_lengths(300, 128) == [128, 128, 44]
    assert block_lengths(256, 128) == [128, 128]
    assert block_lengths(10, 1, first=8) == [8, 1, 1]
    assert block_lengths(5, 128, first=8) == [5]


@pytest.mark.parametrize("skip", [0, 10, 37])
def test_blocks_give_the_logits_of_one_pass(skip):
    model = tiny.model("llama")
    ids = torch.randint(tiny.VOCABULARY, (2, 40))
    with torch.inference_mode():
        whole = model(ids, **{cache_argument(model): DynamicCache()}).logits
    parts = list(logits_in_blocks(model, ids, DynamicCache(), [16, 16, 8], skip))
    torch.testing.assert_close(torch.cat(parts, 1), whole[:, skip:], rtol=1e-4, atol=1e-4)


def test_blocks_give_the_logits_of_one_pass_in_padded_rows():
    model = tiny.model("llama")
    ids = torch.randint(tiny.VOCABULARY, (1, 30))
    padded = torch.cat([torch.zeros(1, 10, dtype=torch.int64), ids], 1)
    mask = torch.cat([torch.zeros(1, 10, dtype=torch.int64), torch.ones_like(ids)], 1)
    with torch.inference_mode():
        whole = model(ids).logits
    parts = list(logits_in_blocks(model, padded, DynamicCache(), [16, 16, 8], 10, mask))
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)
