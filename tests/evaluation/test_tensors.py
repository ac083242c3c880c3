"""Errors of keys, values and attention outputs."""

import pytest
import torch

from kvarn_hf import KVarNCache
from kvarn_hf.evaluation import tensors
from tests.evaluation.common import CACHES


def test_vector_errors_are_those_of_equation_3():
    torch.manual_seed(0)
    exact = torch.randn(2, 3, 50, 8, dtype=torch.float64)
    read = exact * (1 + 0.1 * torch.randn(2, 3, 50, 1)) + 0.05 * torch.randn(2, 3, 50, 8)
    found = tensors.vector_errors(exact, read)
    norm, norm_read = exact.norm(dim=-1), read.norm(dim=-1)
    cosine = torch.nn.functional.cosine_similarity(exact, read, dim=-1)
    magnitude = norm.square() + norm_read.square() - 2 * norm * norm_read
    direction = 2 * norm * norm_read * (1 - cosine)
    error = (exact - read).square().sum(-1)
    torch.testing.assert_close(magnitude + direction, error)
    for row in range(2):
        total, worst = error[row].sum(), error[row].flatten().topk(round(0.05 * 150))
        expected = {
            "relative_error": (total / exact[row].square().sum()).sqrt(),
            "magnitude_share": magnitude[row].sum() / total,
            "worst_magnitude_share": magnitude[row].flatten()[worst.indices].sum() / worst.values.sum(),
            "worst_error_share": worst.values.sum() / total,
            "norm_error": (norm_read[row] / norm[row] - 1).abs().mean(),
            "norm_error_p999": (norm_read[row] / norm[row] - 1).abs().max(),
        }
        assert {name: value[row].item() for name, value in found.items()} == pytest.approx(
            {name: value.item() for name, value in expected.items()}, rel=1e-3
        )


def test_a_pure_magnitude_error_is_all_magnitude():
    exact = torch.randn(1, 2, 100, 16)
    assert tensors.vector_errors(exact, 1.1 * exact)["magnitude_share"].item() == pytest.approx(1, abs=1e-3)
    turned = torch.randn(1, 2, 100, 16)
    turned *= exact.norm(dim=-1, keepdim=True) / turned.norm(dim=-1, keepdim=True)
    assert tensors.vector_errors(exact, turned)["magnitude_share"].item() < 1e-6


def test_tensor_errors_are_those_of_the_cache(loaded, texts):
    model, tokenizer = loaded
    ids = tokenizer(texts[0].read_text(), return_tensors="pt").input_ids[:, :768]
    before = model.config._attn_implementation
    with torch.inference_mode():
        dense = tensors.DenseStates(model, ids)
        assert model.config._attn_implementation == before
        exact = dense.compare({layer: tensors.joined(dense.states, layer) for layer in dense.layers})[0]
        assert max(exact["attention_error"]) == 0 and max(exact["key_relative_error"]) == 0
        cache = KVarNCache(model.config, CACHES[0])
        read = dense.read(model, cache, "static")
        found = dense.compare(read)[0]
        again = dense.compare(dense.read(model, KVarNCache(model.config, CACHES[0]), "accumulated"))[0]
    keys, _ = tensors.joined(dense.states, 1)
    held = slice(128, 768 - 256)
    got = cache.layers[1].keys[:, :, held]
    expected = ((got - keys[:, :, held]).norm() / keys[:, :, held].norm()).item()
    assert found["key_relative_error"][1] == pytest.approx(expected, rel=1e-4) and expected > 0.01
    assert again["key_relative_error"][0] == pytest.approx(found["key_relative_error"][0], rel=1e-3)
    assert again["attention_error"][1] != found["attention_error"][1]


def test_attention_error_is_that_of_the_model(loaded):
    torch.manual_seed(0)
    keys, values, query = torch.randn(1, 1, 20, 32), torch.randn(1, 1, 20, 32), torch.randn(1, 2, 4, 32)
    wrong = values.clone()
    wrong[:, :, -1] += 1  # only the newest token may look at the newest value
    error = tensors.attention_error(query, None, (keys, values), (keys, wrong))
    scores = (query[:, :, -1:] @ keys.mT / 32**0.5).softmax(-1)
    change = scores[..., -1:].expand(1, 2, 1, 32)
    full = torch.cat(
        [
            (query[:, :, i : i + 1] @ keys[:, :, : 17 + i].mT / 32**0.5).softmax(-1) @ values[:, :, : 17 + i]
            for i in range(4)
        ],
        2,
    )
    assert error.item() == pytest.approx((change.norm() / full.norm()).item(), rel=1e-4)
