"""Whole tiles, end to end: against a second implementation in float64 with plain loops, and tiles that break others."""

import math

import numpy as np
import pytest
import torch

from kvarn_hf import KVarNConfig
from kvarn_hf.config import BIT_WIDTHS, METHODS
from kvarn_hf.method.packing import unpack_keys, unpack_values
from kvarn_hf.method.quantize import (
    dequantize_keys,
    dequantize_values,
    key_prescale,
    quantize_keys,
    quantize_values,
)
from kvarn_hf.method.rotation import rotate

# --- The method once more: one tile, float64, loops over rows. -------------------------------------------------------

SPANS = {2: np.linspace(1, 0.45, 12), 3: np.linspace(1, 0.6, 9), 4: np.linspace(1, 0.76, 7), 8: np.array([1.0])}
LOWEST = {2: 0, 3: 0, 4: 0, 8: -128}  # code, which is stored as 0


def half(x):
    return np.float64(np.float16(x))


def hadamard_blocks(head_dim):
    block = head_dim & -head_dim
    matrix = np.zeros((head_dim, head_dim))
    for i in range(head_dim):
        for j in range(head_dim):
            if i // block == j // block:
                matrix[i, j] = (-1) ** (i % block & j % block).bit_count() / math.sqrt(block)
    return matrix


def naive_log_std(x):
    return math.log(min(max(float(np.std(x)), 1e-3), 1e3))


def naive_normalize(tile, start, iterations, best):
    """Log scales of columns and rows: Algorithm 1 from ``start``, clamped relative to it; best or last state."""
    rows, columns = tile.shape
    log_row, log_column = np.full(rows, start), np.zeros(columns)
    states = []
    for step in range(iterations + 1):
        residue = tile / np.exp(log_column)[None] / np.exp(log_row)[:, None]
        column = np.array([naive_log_std(residue[:, c]) for c in range(columns)])
        row = np.array([naive_log_std(residue[r]) for r in range(rows)])
        imbalance = np.exp(column.max() - column.min()) + np.exp(row.max() - row.min())
        states.append((imbalance, log_column, log_row))
        if step == iterations:
            break
        log_column = np.clip(log_column + column, -0.3, 10)
        residue = tile / np.exp(log_column)[None] / np.exp(log_row)[:, None]
        row = np.array([naive_log_std(residue[r]) for r in range(rows)])
        log_row = np.clip(log_row + row, start - 0.3, start + 10)
    return min(states, key=lambda state: state[0])[1:] if best else states[-1][1:]


def naive_codes(x, scale, zero_point, bits):
    return np.clip(np.rint((x - zero_point) / scale), LOWEST[bits], LOWEST[bits] + 2**bits - 1)


def naive_grid(row, bits, power):
    low, high = row.min(), row.max()
    best = None
    for a in SPANS[bits] if power else [1.0]:
        scale = a * (high - low) / (2**bits - 1)
        zero_point = low + (1 - a) / 2 * (high - low) - LOWEST[bits] * scale
        codes = naive_codes(row, scale, zero_point, bits)
        error = (np.abs(codes * scale + zero_point - row) ** (power or 1)).sum()
        if best is None or error < best[0]:
            best = error, scale, zero_point
    return best[1:]


def naive_keys(keys, prescale, bits, published):
    """Of one key tile [token, channel]: codes, grid scale per channel, token scale, zero point per channel."""
    tokens, head_dim = keys.shape
    tile = ((keys * prescale) @ hadamard_blocks(head_dim)).T  # [channel, token]
    start = 0.0 if published else math.log(tile.std())
    log_column, log_row = naive_normalize(tile, start, 8 if published else 2, best=published)
    token_scale = half(np.exp(log_column))
    codes, scales, zeros = np.zeros_like(tile), np.zeros(head_dim), np.zeros(head_dim)
    for d in range(head_dim):
        normalized = tile[d] / token_scale / math.exp(log_row[d])
        scale, zero_point = naive_grid(normalized, bits, 0 if published else 4)
        scales[d] = max(half(scale * math.exp(log_row[d])), 6e-8)
        zeros[d] = half(zero_point * math.exp(log_row[d]))
        codes[d] = naive_codes(tile[d] / token_scale, scales[d], zeros[d], bits)
    if not published:
        for t in range(tokens):
            tile_hat = (codes[:, t] * scales + zeros) * token_scale[t]
            ratio = np.linalg.norm(tile[:, t]) / np.linalg.norm(tile_hat)
            token_scale[t] = half(token_scale[t] * min(max(ratio, 0.5), 2.0))
    return codes.T, scales, token_scale, zeros


def naive_values(values, bits, published):
    """Of one value tile [token, channel]: codes, grid scale per token, channel scale, zero point per token."""
    tokens, head_dim = values.shape
    tile = values @ hadamard_blocks(head_dim)
    start = 0.0 if published else math.log(tile.std())
    log_column, _ = naive_normalize(tile, start, 8 if published else 2, best=published)
    column = half(np.exp(log_column)) if published else np.exp(log_column)
    scales, zeros = np.zeros(tokens), np.zeros(tokens)
    for t in range(tokens):
        scales[t], zeros[t] = naive_grid(tile[t] / column, bits, 0 if published else 2)
    if published:
        scales, zeros = np.maximum(half(scales), 6e-8), half(zeros)

    def encode():
        return np.array([naive_codes(tile[t] / column, scales[t], zeros[t], bits) for t in range(tokens)])

    def refit():
        for t in range(tokens):
            # tile[t] ~ column (codes scale + zero), by the normal equations
            design = np.stack([column * codes[t], column], 1)
            normal = design.T @ design
            if np.linalg.det(normal) > 1e-6 * normal[0, 0] * normal[1, 1]:
                scales[t], zeros[t] = np.linalg.solve(normal, design.T @ tile[t])

    codes = encode()
    if published:
        return codes, scales, column, zeros
    for _ in range(4 if bits == 2 else 2):
        refit()
        for d in range(head_dim):
            u = codes[:, d] * scales + zeros
            column[d] = (tile[:, d] @ u) / (u @ u)
        codes = encode()
    refit()
    for t in range(tokens):
        ratio = np.linalg.norm(tile[t]) / np.linalg.norm((codes[t] * scales[t] + zeros[t]) * column)
        ratio = min(max(ratio, 0.5), 2.0) ** 1.5
        scales[t], zeros[t] = max(half(scales[t] * ratio), 6e-8), half(zeros[t] * ratio)
    return codes, scales, half(column), zeros


# --- Tiles -----------------------------------------------------------------------------------------------------------


def gaussian(*shape, seed=0, tokens=0.3, channels=0.3):
    """Gaussian ``[..., token, channel]`` with uneven tokens and channels, around uneven means."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *s: torch.randn(*s, generator=generator)  # noqa: E731
    *lead, size, head_dim = shape
    x = draw(*shape) + draw(*lead, 1, head_dim)
    return x * (tokens * draw(*lead, size, 1)).exp() * (channels * draw(*lead, 1, head_dim)).exp()


def outlier_token(seed=0, size=128, head_dim=64):
    return gaussian(size, head_dim, seed=seed) * torch.where(torch.arange(size) == 11, 30.0, 1.0)[:, None]


def outlier_pair(seed=0, size=128, head_dim=64):
    """Keys like Qwen2.5's: one RoPE pair whose deviation is about 80 times the other channels'."""
    x = gaussian(size, head_dim, seed=seed, channels=0.1)
    angle = 0.7 * torch.arange(size)
    x[:, 5], x[:, 5 + head_dim // 2] = x[:, 5] + 110 * angle.cos(), x[:, 5 + head_dim // 2] + 110 * angle.sin()
    return x


def both(x, config, prescale=None):
    """Keys and values read back."""
    keys = dequantize_keys(quantize_keys(x, prescale, config), prescale, config)
    return keys, dequantize_values(quantize_values(x, config), config)


def relative_error(x_hat, x):
    return float((x_hat.double() - x.double()).norm() / x.double().norm())


def assert_same_tile(codes, grid_scale, column_scale, zero_point, expected):
    expected_codes, *expected_scales = expected
    difference = np.abs(codes.numpy() - expected_codes)
    assert difference.max() <= 1
    assert (difference > 0).mean() < 2e-3  # rounding ties between float32 and float64
    # A power of two may stand in the grid or in the columns' scale: only the product matters.
    shift = 2 ** np.rint(np.log2(np.median(column_scale.double().numpy() / expected_scales[1])))
    ours = [grid_scale * shift, column_scale / shift, zero_point * shift]
    for found, scale in zip(ours, expected_scales, strict=True):
        # Two units in the last place of a float16; a code at a tie moves what is fitted to its row a little more.
        deviation = np.abs(found.double().numpy() - scale) / (np.abs(scale) + np.abs(scale).mean())
        assert deviation.max() < 1e-2
        assert (deviation > 1e-3).mean() < 0.02


METHODS_COMPARED = [("kvarn", False), ("published", True)]


@pytest.mark.parametrize("bits", BIT_WIDTHS)
@pytest.mark.parametrize(("method", "published"), METHODS_COMPARED)
@pytest.mark.parametrize(
    ("make", "size", "head_dim"),
    [(gaussian, 128, 64), (gaussian, 64, 128), (gaussian, 64, 80), (outlier_token, 128, 64), (outlier_pair, 64, 96)],
)
def test_keys_agree_with_a_second_implementation(make, size, head_dim, method, published, bits):
    x = make(size, head_dim, seed=bits) if make is gaussian else make(bits, size, head_dim)
    config = KVarNConfig(key_bits=bits, tile_size=size, method=method)
    prescale = None if published else key_prescale(x)
    packed = quantize_keys(x, prescale, config)
    factors = np.ones(head_dim) if prescale is None else prescale.double().numpy()
    expected = naive_keys(x.double().numpy(), factors, bits, published)
    codes = unpack_keys(packed.codes, bits).double() + LOWEST[bits]
    assert_same_tile(codes, packed.channel_scale, packed.token_scale, packed.zero_point, expected)
    codes, channel_scale, token_scale, zero_point = expected
    read = ((codes * channel_scale + zero_point) * token_scale[:, None]) @ hadamard_blocks(head_dim) / factors
    ours = dequantize_keys(packed, prescale, config)
    assert relative_error(ours, torch.from_numpy(read)) < 0.05 * relative_error(ours, x) + 2e-3
    assert relative_error(ours, x) < 1.01 * relative_error(torch.from_numpy(read), x) + 1e-5


@pytest.mark.parametrize("bits", BIT_WIDTHS)
@pytest.mark.parametrize(("method", "published"), METHODS_COMPARED)
@pytest.mark.parametrize(
    ("make", "size", "head_dim"),
    [(gaussian, 128, 64), (gaussian, 64, 128), (gaussian, 64, 80), (outlier_token, 128, 64)],
)
def test_values_agree_with_a_second_implementation(make, size, head_dim, method, published, bits):
    x = make(size, head_dim, seed=bits) if make is gaussian else make(bits, size, head_dim)
    config = KVarNConfig(value_bits=bits, tile_size=size, method=method)
    packed = quantize_values(x, config)
    expected = naive_values(x.double().numpy(), bits, published)
    codes = unpack_values(packed.codes, bits).double() + LOWEST[bits]
    assert_same_tile(codes, packed.token_scale, packed.channel_scale, packed.zero_point, expected)
    codes, token_scale, channel_scale, zero_point = expected
    read = ((codes * token_scale[:, None] + zero_point[:, None]) * channel_scale) @ hadamard_blocks(head_dim)
    ours = dequantize_values(packed, config)
    assert relative_error(ours, torch.from_numpy(read)) < 0.05 * relative_error(ours, x) + 2e-3
    assert relative_error(ours, x) < 1.01 * relative_error(torch.from_numpy(read), x) + 1e-5


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


# --- Tiles that break others -----------------------------------------------------------------------------------------


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


# --- The pre-scale ---------------------------------------------------------------------------------------------------


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


# --- What the improvements are worth ---------------------------------------------------------------------------------


def mean_error(make, method, bits, side):
    config = KVarNConfig(key_bits=bits, value_bits=bits, method=method)
    tiles = torch.stack([make(seed) for seed in range(8)])
    if side == 0:
        prescale = key_prescale(tiles) if method == "kvarn" else None
        return relative_error(dequantize_keys(quantize_keys(tiles, prescale, config), prescale, config), tiles)
    return relative_error(dequantize_values(quantize_values(tiles, config), config), tiles)


def uneven(seed):
    return gaussian(128, 64, seed=seed)


def plain(seed):
    return gaussian(128, 64, seed=seed, tokens=0.0, channels=0.0)


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
