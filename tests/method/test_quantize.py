"""Whole tiles, end to end: how exact each method is, and tiles that break others."""

import math

import pytest
import torch

from kvarn_hf import KVarNConfig
from kvarn_hf.config import BIT_WIDTHS, METHODS
from kvarn_hf.method.quantize import dequantize_keys, key_prescale, quantize_keys, quantize_values
from kvarn_hf.method.rotation import rotate
from tests.method.tiles import both, gaussian, mean_error, outlier_pair, outlier_token, plain, relative_error, uneven


@pytest.mark.parametrize("bits", BIT_WIDTHS)
def test_rtn_and_hadamard_are_round_to_nearest_on_the_full_range(bits):
    x = gaussian(64, 32, seed=1)
    levels = 2**bits - 1
    for method, tile in (("rtn", x), ("hadamard", rotate(x))):
        config = KVarNConfig(key_bits=bits, value_bits=bits, tile_size=64, method=method)
        for dim, x_hat in zip((-2, -1), both(x, config), strict=True):
            low, high = tile.aminmax(dim=dim, keepdim=True)
            step = (high - low) / levels
            error = ((rotate(x_hat) if method == "hadamard" else x_hat) - tile).abs()
            # Half a step, plus what float16 scales and zero points cost.
            assert (error <= step / 2 + 2**-10 * (low.abs() + levels * step)).all()


@pytest.mark.parametrize(
    ("make", "bits", "side", "methods"),
    [
        # Clipping: a large gain at two bits, a small one at more.
        *((plain, bits, side, ("kvarn", "published", "rtn")) for bits in (2, 3) for side in (0, 1)),
        *((uneven, bits, side, ("kvarn", "published", "rtn")) for bits in (2, 3) for side in (0, 1)),
        # Normalization of tokens: what rotation alone cannot do for keys, and what the clamp at -0.3 denies to values.
        *((outlier_token, bits, 0, ("kvarn", "published", "hadamard")) for bits in BIT_WIDTHS),
        *((outlier_token, bits, 1, ("kvarn", "published", "rtn")) for bits in BIT_WIDTHS),
        # A key-bias pair: the published method is worse than plain rounding per channel, the pre-scale is not.
        *((outlier_pair, bits, 0, ("kvarn", "rtn", "published")) for bits in (2, 3, 4)),
    ],
)
def test_methods_rank_as_they_should(make, bits, side, methods):
    best, middle, worst = (mean_error(make, method, bits, side) for method in methods)
    assert best < 0.95 * middle
    assert middle < worst
    if bits == 2:
        assert best < 0.75 * middle


@pytest.mark.parametrize("bits", BIT_WIDTHS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("make", [uneven, outlier_token, outlier_pair])
def test_more_bits_are_more_exact(make, method, bits):
    if bits == 8:
        return
    more = BIT_WIDTHS[BIT_WIDTHS.index(bits) + 1]
    for side in (0, 1):
        assert mean_error(make, method, more, side) < 0.8 * mean_error(make, method, bits, side)


@pytest.mark.parametrize("bits", BIT_WIDTHS)
@pytest.mark.parametrize("x", [gaussian(128, 64, seed=7), outlier_token(7), gaussian(128, 64, seed=8) * 1e4])
def test_keys_keep_their_norms(x, bits):
    """In the rotated frame, which the pre-scale bends; without one, in the model's own."""
    config = KVarNConfig(key_bits=bits, value_bits=bits)
    x_hat, _ = both(x, config)
    torch.testing.assert_close(x_hat.norm(dim=-1), x.norm(dim=-1), rtol=1e-3, atol=0)
    prescale = key_prescale(outlier_pair(7))
    bent = x * prescale
    read = dequantize_keys(quantize_keys(x, prescale, config), prescale, config) * prescale
    torch.testing.assert_close(read.norm(dim=-1), bent.norm(dim=-1), rtol=1e-3, atol=0)


@pytest.mark.parametrize("bits", BIT_WIDTHS)
@pytest.mark.parametrize("x", [gaussian(128, 64, seed=7), outlier_token(7), gaussian(128, 64, seed=8) * 1e4])
def test_values_are_as_much_too_long_as_their_projection_is_short(x, bits):
    _, x_hat = both(x, KVarNConfig(key_bits=bits, value_bits=bits))
    length = x_hat.norm(dim=-1) / x.norm(dim=-1)
    projection = (x_hat * x).sum(-1) / x.square().sum(-1)
    torch.testing.assert_close(length * projection, torch.ones(128), rtol=2e-3, atol=0)
    assert (length > 1.0 if bits == 2 else length > 1 - 1e-3).all()


def test_batches_give_what_tiles_give_alone():
    x = torch.stack([gaussian(64, 32, seed=s) * 10.0 ** (s - 2) for s in range(6)]).reshape(2, 3, 64, 32)
    config = KVarNConfig(tile_size=64)
    prescale = key_prescale(x)
    together = both(x, config, prescale)
    for b in range(2):
        for h in range(3):
            alone = both(x[b, h], config, key_prescale(x[b, h]))
            for one, all_ in zip(alone, together, strict=True):
                torch.testing.assert_close(one, all_[b, h], rtol=1e-5, atol=1e-5 * float(x[b, h].abs().max()))


def test_any_strides_give_the_same_codes():
    x = gaussian(2, 3, 64, 32, seed=14)
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    config = KVarNConfig(tile_size=64)
    for quantize in (lambda y: quantize_keys(y, None, config), lambda y: quantize_values(y, config)):
        assert all(torch.equal(a, b) for a, b in zip(quantize(x), quantize(strided), strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_computes_in_float32(dtype):
    x = gaussian(2, 128, 64, seed=5).to(dtype)
    config = KVarNConfig()
    prescale = key_prescale(x)
    assert torch.equal(prescale, key_prescale(x.float()))
    for half_precision, single in (
        (quantize_keys(x, prescale, config), quantize_keys(x.float(), prescale, config)),
        (quantize_values(x, config), quantize_values(x.float(), config)),
    ):
        assert all(torch.equal(a, b) for a, b in zip(half_precision, single, strict=True))


@pytest.mark.parametrize("bits", BIT_WIDTHS)
@pytest.mark.parametrize("method", METHODS)
def test_zero_and_constant_tiles(method, bits):
    config = KVarNConfig(key_bits=bits, value_bits=bits, tile_size=64, method=method)
    zero = torch.zeros(64, 64)
    assert torch.equal(key_prescale(zero), torch.ones(64, dtype=torch.float16))
    for x_hat in both(zero, config, None if method == "rtn" else key_prescale(zero)):
        assert x_hat.abs().max() < 1e-6
    constant = torch.full((64, 64), -2.75)
    for x_hat in both(constant, config):
        assert relative_error(x_hat, constant) < 5e-3  # float16 scales and zero points
    same_tokens = gaussian(1, 64, seed=3).expand(64, 64)
    keys, _ = both(same_tokens, config)
    assert relative_error(keys, same_tokens) < 1e-3


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(3))
def test_outliers_stay_finite_and_bounded(method, seed):
    config = KVarNConfig(key_bits=4, value_bits=4, method=method)
    for x in (outlier_token(seed), outlier_pair(seed), outlier_token(seed).cumsum(0)):
        for x_hat in both(x, config):
            assert x_hat.isfinite().all()
            assert relative_error(x_hat, x) < 0.3


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("magnitude", [1e5, 3e38, 1e-5, 1e-30])
def test_huge_and_tiny_bfloat16_tiles_lose_no_more_than_others(magnitude, method, bits):
    config = KVarNConfig(key_bits=bits, value_bits=bits, method=method)
    x = gaussian(128, 64, seed=4, tokens=0.2, channels=0.2)
    scaled = (x / x.abs().max() * magnitude).bfloat16()
    for x_hat, expected in zip(both(scaled, config), both(x.bfloat16(), config), strict=True):
        assert x_hat.isfinite().all()
        if magnitude < 1e-10:  # below the product of two float16: comes back as zero, nearly
            assert x_hat.abs().max() <= 1e-6
        elif magnitude < 1e10:  # past it, saturates instead of overflowing
            # The absolute clamps of the published algorithm make it depend on the magnitude.
            allowed = 1.3 if method == "published" else 1.1
            assert relative_error(x_hat, scaled.float()) < allowed * relative_error(expected, x) + 1e-3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("method", METHODS)
def test_broken_tokens_do_not_spread(method, bad):
    config = KVarNConfig(tile_size=64, method=method)
    x = gaussian(2, 64, 32, seed=6)
    broken = x.clone()
    broken[0, 7, 3] = bad
    zeroed = x.clone()
    zeroed[0, 7] = 0.0
    assert torch.equal(key_prescale(broken), key_prescale(zeroed))
    for broken_hat, zeroed_hat in zip(both(broken, config), both(zeroed, config), strict=True):
        others = torch.ones(2, 64, dtype=torch.bool)
        others[0, 7] = False
        assert broken_hat[0, 7].isnan().all()
        assert torch.equal(broken_hat[others], zeroed_hat[others])
        assert broken_hat[others].isfinite().all()
