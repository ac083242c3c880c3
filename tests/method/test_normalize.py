"""Variance normalization: against a second derivation in float64 with plain loops, and what it is for."""

import itertools
import math

import numpy as np
import pytest
import torch

from kvarn_hf.method.normalize import variance_normalize, variance_normalize_published


def gaussian(rows=24, columns=64, seed=0, uneven=0.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    row_scale = (uneven * torch.randn(rows, 1, generator=generator)).exp()
    column_scale = (uneven * torch.randn(1, columns, generator=generator)).exp()
    return x * row_scale * column_scale


def std(values):
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))


def log_std(values):
    return math.log(min(max(std(values), 1e-3), 1e3))


def clamp(x, low, high):
    return min(max(x, low), high)


def divided(tile, log_row, log_column):
    column, row = [math.exp(c) for c in log_column], [math.exp(r) for r in log_row]
    return [[x / c / r for x, c in zip(line, column, strict=True)] for line, r in zip(tile, row, strict=True)]


def naive_improved(tile, iterations):
    """Rows start at the tile's own deviation; columns, then rows; clamps relative to the start; the last state."""
    tile = tile.double().numpy()
    rows, columns = tile.shape
    start = math.log(std(tile.ravel().tolist()))
    log_row, log_column = [start] * rows, [0.0] * columns
    for _ in range(iterations):
        residue = divided(tile, log_row, log_column)
        for c in range(columns):
            log_column[c] = clamp(log_column[c] + log_std([residue[r][c] for r in range(rows)]), -0.3, 10.0)
        residue = divided(tile, log_row, log_column)
        for r in range(rows):
            log_row[r] = clamp(log_row[r] + log_std(residue[r]), start - 0.3, start + 10.0)
    return np.exp(log_column)


def naive_published(tile, iterations):
    """Algorithm 1: everything starts at 0, absolute clamps; every state seen with its imbalance, in order."""
    tile = tile.double().numpy()
    rows, columns = tile.shape
    log_row, log_column = [0.0] * rows, [0.0] * columns
    states = []
    for step in range(iterations + 1):
        residue = divided(tile, log_row, log_column)
        column_std = [math.exp(log_std([residue[r][c] for r in range(rows)])) for c in range(columns)]
        row_std = [math.exp(log_std(residue[r])) for r in range(rows)]
        imbalance = max(column_std) / min(column_std) + max(row_std) / min(row_std)
        states.append((imbalance, np.exp(log_column), np.exp(log_row)))
        if step == iterations:
            return states
        log_column = [clamp(log_column[c] + math.log(column_std[c]), -0.3, 10.0) for c in range(columns)]
        residue = divided(tile, log_row, log_column)
        log_row = [clamp(log_row[r] + log_std(residue[r]), -0.3, 10.0) for r in range(rows)]
    return states


def imbalance(tile):
    columns, rows = tile.std(-2, correction=0), tile.std(-1, correction=0)
    return columns.max() / columns.min() + rows.max() / rows.min()


TILES = {
    "even": gaussian(),
    "uneven": gaussian(seed=1, uneven=0.4),
    "very uneven": gaussian(seed=2, uneven=1.5),
    "outlier row": gaussian(seed=3) * torch.where(torch.arange(24) == 5, 80.0, 1.0)[:, None],
    "outlier column": gaussian(seed=4) * torch.where(torch.arange(64) == 9, 80.0, 1.0),
    "constant column": gaussian(seed=5) * (torch.arange(64) != 7),
    "large": gaussian(seed=6, uneven=0.4) * 300,
    "small": gaussian(seed=7, uneven=0.4) / 300,
}


@pytest.mark.parametrize("iterations", [0, 1, 2, 5])
@pytest.mark.parametrize("name", TILES)
def test_improved_agrees_with_a_second_derivation(name, iterations):
    column_scale = variance_normalize(TILES[name], iterations)
    assert column_scale.shape == (1, TILES[name].shape[1])
    np.testing.assert_allclose(column_scale[0].numpy(), naive_improved(TILES[name], iterations), rtol=2e-5)


@pytest.mark.parametrize("iterations", [0, 1, 8])
@pytest.mark.parametrize("name", TILES)
def test_published_agrees_with_a_second_derivation_and_keeps_the_best_state(name, iterations):
    column_scale, row_scale = variance_normalize_published(TILES[name], iterations)
    states = naive_published(TILES[name], iterations)
    lowest = min(state[0] for state in states)
    # States whose imbalance differs by less than float32 resolves are equally good.
    best = [state for state in states if state[0] <= lowest * (1 + 1e-6)]
    assert any(
        np.allclose(column_scale[0], columns, rtol=2e-5) and np.allclose(row_scale[:, 0], rows, rtol=2e-5)
        for _, columns, rows in best
    )


def test_published_never_ends_above_any_state_on_the_way():
    # Its clamp at -0.3 makes later rounds worse than earlier ones on tiles of deviation below 0.74.
    tile = gaussian(seed=8, uneven=0.8) * 0.3
    reached = [imbalance(tile / c / r) for c, r in (variance_normalize_published(tile, k) for k in range(9))]
    assert all(later <= earlier * (1 + 1e-5) for earlier, later in itertools.pairwise(reached))


def test_even_tile_is_a_fixed_point():
    # +1 and -1 in equal numbers in every row and column: every deviation is 1 already.
    sign = torch.where((torch.arange(16)[:, None] + torch.arange(64)) % 2 == 0, 1.0, -1.0)
    for scale in (1.0, 1000.0, 1e-4):
        torch.testing.assert_close(variance_normalize(sign * scale, 4), torch.ones(1, 64))
    columns, rows = variance_normalize_published(sign, 8)
    assert torch.equal(columns, torch.ones(1, 64))
    assert torch.equal(rows, torch.ones(16, 1))


def test_finds_the_scales_that_even_columns_were_given():
    sign = torch.where((torch.arange(16)[:, None] + torch.arange(64)) % 2 == 0, 1.0, -1.0)
    column_scale = torch.linspace(-0.2, 0.2, 64).exp()
    found = variance_normalize(sign * column_scale, 2)[0]
    torch.testing.assert_close(found / found[0], column_scale / column_scale[0], rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["uneven", "very uneven", "outlier column"])
def test_imbalance_falls(name):
    tile = TILES[name]
    columns, rows = variance_normalize_published(tile, 8)
    assert imbalance(tile / columns / rows) < 0.5 * imbalance(tile)
    normalized = tile / variance_normalize(tile, 2)
    spread = tile.std(0).max() / tile.std(0).min()
    assert (normalized.std(0).max() / normalized.std(0).min()) < spread


def test_two_iterations_are_where_sixteen_end():
    for seed in range(5):
        tile = gaussian(128, 128, seed=seed, uneven=0.3)
        two, sixteen = variance_normalize(tile, 2), variance_normalize(tile, 16)
        assert ((two / sixteen).log().abs() < 0.05).all()


def test_published_clamp_disables_it_on_small_tiles_and_the_improved_one_does_not():
    tile = gaussian(64, 128, seed=9, uneven=0.2)
    small = tile * 1e-2
    assert variance_normalize_published(small, 8)[0].unique().numel() == 1
    torch.testing.assert_close(variance_normalize(small, 2), variance_normalize(tile, 2), rtol=1e-5, atol=0)


def test_scale_of_the_tile_does_not_matter():
    tile = gaussian(seed=10, uneven=0.5)
    expected = variance_normalize(tile, 2)
    for exponent in (-60, -20, 3, 60):
        torch.testing.assert_close(variance_normalize(tile * 2.0**exponent, 2), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5])
def test_constant_tiles_stay_finite(value):
    tile = torch.full((8, 64), value)
    assert variance_normalize(tile, 2).isfinite().all()
    assert all(scale.isfinite().all() for scale in variance_normalize_published(tile, 8))


def test_tiles_of_a_batch_do_not_mix():
    batch = torch.stack([gaussian(seed=s, uneven=0.5) * 10.0 ** (s - 2) for s in range(4)]).reshape(2, 2, 24, 64)
    together = variance_normalize(batch, 2)
    columns, rows = variance_normalize_published(batch, 8)
    for i in range(2):
        for j in range(2):
            torch.testing.assert_close(together[i, j], variance_normalize(batch[i, j], 2), rtol=1e-5, atol=0)
            alone = variance_normalize_published(batch[i, j], 8)
            torch.testing.assert_close((columns[i, j], rows[i, j]), alone, rtol=1e-5, atol=0)
