"""The pre-scale of keys."""

import math

import numpy as np
import pytest
import torch

from kvarn_hf import KVarNConfig
from kvarn_hf.method.quantize import dequantize_keys, key_prescale, quantize_keys
from kvarn_hf.method.rotation import rotate
from tests.method.tiles import gaussian, half, outlier_pair, relative_error


def naive_prescale(keys):
    std = keys.std(axis=0)
    median = np.sort(std)[(len(std) - 1) // 2]
    ratio = np.clip(std / median, 0.25, 1e3)
    outliers = [d for d in range(len(std)) if ratio[d] > 2]
    offset = sum(keys[:, d].mean() ** 2 for d in outliers) / sum(std[d] ** 2 for d in outliers) if outliers else 0
    late = min(max(2 * offset - 1, 0), 1)
    start, end = 1 + 2 * late, 3 + late
    power = 0.75 * min(max((math.log2(ratio.max()) - start) / (end - start), 0), 1)
    return half(ratio**-power)


def test_no_outlier_channel_no_prescale():
    x = gaussian(128, 64, seed=9, channels=0.1, tokens=0.0)
    assert torch.equal(key_prescale(x), torch.ones(64, dtype=torch.float16))
    assert torch.equal(key_prescale(x * 1e30), torch.ones(64, dtype=torch.float16))


@pytest.mark.parametrize("offset", [0.0, 0.8, 0.95, 3.0])
@pytest.mark.parametrize("outlier", [1.0, 2.0, 3.0, 5.0, 8.0, 12.0, 40.0, 1e4])
def test_prescale_agrees_with_a_second_derivation(outlier, offset):
    x = gaussian(128, 64, seed=10, channels=0.2)
    x[:, 13] *= outlier
    x[:, 13] += offset * x[:, 13].std()
    expected = naive_prescale(x.double().numpy())
    np.testing.assert_allclose(key_prescale(x).double(), expected, rtol=2e-3)
    np.testing.assert_allclose(key_prescale(x.reshape(1, 1, 128, 64))[0, 0].double(), expected, rtol=2e-3)


@pytest.mark.parametrize(
    ("offset", "outlier", "power"),
    [(0.0, 1.9, 0), (0.0, 4.0, 0.375), (0.0, 8.0, 0.75), (1.1, 7.9, 0), (1.1, 12.0, 0.4387), (1.1, 16.0, 0.75)],
)
def test_prescale_begins_later_where_tokens_share_an_offset(offset, outlier, power):
    x = torch.ones(128, 64)
    x[::2] = -1
    x += 5.0  # an offset of the other channels, which does not count
    x[:, 13] = (x[:, 13] - 5.0 + offset) * outlier
    prescale = key_prescale(x)
    assert prescale[13].item() == pytest.approx(outlier**-power, rel=2e-3)
    assert (prescale.sum() - prescale[13]).item() == 63  # channels at the median are left alone


def test_prescale_keeps_scores():
    keys, query = outlier_pair(11), gaussian(5, 64, seed=12)
    prescale = key_prescale(keys).float()
    scores = rotate(query / prescale) @ rotate(keys * prescale).mT
    torch.testing.assert_close(scores, query @ keys.mT, rtol=1e-4, atol=1e-2)


def test_prescale_repairs_the_other_channels_of_a_key_bias_pair():
    keys = outlier_pair(13)
    prescale = key_prescale(keys)
    config = KVarNConfig()
    others = torch.ones(64, dtype=torch.bool)
    others[[5, 37]] = False
    with_it = dequantize_keys(quantize_keys(keys, prescale, config), prescale, config)
    without = dequantize_keys(quantize_keys(keys, None, config), None, config)
    assert relative_error(without[:, others], keys[:, others]) > 0.4  # drowned
    assert relative_error(with_it[:, others], keys[:, others]) < 0.2
    assert relative_error(with_it[:, ~others], keys[:, ~others]) < 0.1
