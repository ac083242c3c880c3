"""Whole tiles, end to end, against a second implementation: one tile, float64, loops over rows."""

import math

import numpy as np
import pytest
import torch

from kvarn_hf import KVarNConfig
from kvarn_hf.config import BIT_WIDTHS
from kvarn_hf.method.packing import unpack_keys, unpack_values
from kvarn_hf.method.quantize import dequantize_keys, dequantize_values, key_prescale, quantize_keys, quantize_values
from tests.method.tiles import gaussian, half, outlier_pair, outlier_token, relative_error

SPANS = {2: np.linspace(1, 0.45, 12), 3: np.linspace(1, 0.6, 9), 4: np.linspace(1, 0.76, 7), 8: np.array([1.0])}
LOWEST = {2: 0, 3: 0, 4: 0, 8: -128}  # code, which is stored as 0


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
