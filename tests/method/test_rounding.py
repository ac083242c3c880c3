"""Grids and codes of single rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarn_hf.config import BIT_WIDTHS
from kvarn_hf.method.rounding import (
    CLIP_SEARCH,
    encode,
    full_range_grid,
    norm_ratio,
    refit_columns,
    refit_grid,
    search_grid,
)

LOWEST = {2: 0, 3: 0, 4: 0, 8: -128}

bits_and_seeds = given(bits=st.sampled_from(BIT_WIDTHS), seed=st.integers(0, 2**16), tails=st.floats(0.0, 2.0))
quick = settings(derandomize=True, deadline=None, max_examples=40)


def rows(seed, tails=0.0, shape=(12, 64)):
    """Gaussian rows of mixed magnitude; ``tails`` makes some entries large."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    heavy = (tails * torch.randn(shape, generator=generator)).exp()
    return x * heavy * (2 * torch.randn(shape[0], 1, generator=generator)).exp()


def error(x, scale, zero_point, bits, power=2):
    return (encode(x, scale, zero_point, bits) * scale + zero_point - x).abs().double().pow(power).sum(-1)


@quick
@bits_and_seeds
def test_encode_is_optimal_for_its_grid(bits, seed, tails):
    x = rows(seed, tails)
    scale, zero_point = search_grid(x, bits, power=2)
    codes = encode(x, scale, zero_point, bits)
    assert torch.equal(codes, codes.round().clamp(LOWEST[bits], LOWEST[bits] + 2**bits - 1))
    every = torch.arange(LOWEST[bits], LOWEST[bits] + 2**bits).float()
    every = every * scale.unsqueeze(-1) + zero_point.unsqueeze(-1)  # [rows, 1, codes]
    nearest = (every - x.unsqueeze(-1)).abs().amin(-1)
    reached = (codes * scale + zero_point - x).abs()
    torch.testing.assert_close(reached, nearest, rtol=1e-5, atol=float(1e-6 * x.abs().max()))


def test_encode_rounds_halves_to_even_and_clamps():
    x = torch.tensor([[-9.0, 0.5, 1.5, 2.5, 3.5, 1e30, -1e30]])
    one, zero = torch.ones(1, 1), torch.zeros(1, 1)
    assert encode(x, one, zero, 2).tolist() == [[0, 0, 2, 2, 3, 3, 0]]
    assert encode(x, one, zero, 8).tolist() == [[-9, 0, 2, 2, 4, 127, -128]]


def test_encode_keeps_its_input():
    x = rows(0)
    before = x.clone()
    encode(x, *full_range_grid(x, 4), 4)
    search_grid(x, 2, power=4)
    assert torch.equal(x, before)


@quick
@bits_and_seeds
def test_full_range_grid_reaches_both_ends(bits, seed, tails):
    x = rows(seed, tails)
    scale, zero_point = full_range_grid(x, bits)
    first, last = LOWEST[bits], LOWEST[bits] + 2**bits - 1
    close = {"rtol": 1e-5, "atol": float(1e-6 * x.abs().max())}
    torch.testing.assert_close(zero_point + first * scale, x.amin(-1, keepdim=True), **close)
    torch.testing.assert_close(zero_point + last * scale, x.amax(-1, keepdim=True), **close)
    codes = encode(x, scale, zero_point, bits)
    assert (codes.amin(-1) == first).all()
    assert (codes.amax(-1) == last).all()
    half = (scale / 2 * (1 + 1e-4)).expand_as(x) + 1e-6 * x.abs().max()
    assert ((codes * scale + zero_point - x).abs() <= half).all()


@quick
@bits_and_seeds
def test_search_is_never_worse_than_the_full_range_in_its_own_norm(bits, seed, tails):
    x = rows(seed, tails)
    for power in (2, 4):
        searched = error(x, *search_grid(x, bits, power), bits, power)
        full = error(x, *full_range_grid(x, bits), bits, power)
        assert (searched <= full * (1 + 1e-5)).all()


@quick
@bits_and_seeds
def test_search_takes_the_best_of_the_documented_spans(bits, seed, tails):
    x = rows(seed, tails)
    low, span = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)
    narrowest, count = CLIP_SEARCH[bits]
    for power in (2, 4):
        best = torch.stack(
            [
                error(x, scale, low + (1 - a) / 2 * span - LOWEST[bits] * scale, bits, power)
                for a in torch.linspace(1, narrowest, count)
                for scale in [a * span / (2**bits - 1)]
            ]
        ).amin(0)
        torch.testing.assert_close(error(x, *search_grid(x, bits, power), bits, power), best, rtol=1e-4, atol=0)


def test_search_clips_less_in_the_fourth_power():
    x = rows(3, shape=(64, 128))
    x[:, 17] = 8 * x.std(-1)  # an outlier token in every channel
    squares, fourths = search_grid(x, 2, power=2), search_grid(x, 2, power=4)
    assert fourths[0].sum() > squares[0].sum()
    at_outlier = [(encode(x, *grid, 2) * grid[0] + grid[1] - x)[:, 17].abs().mean() for grid in (squares, fourths)]
    assert at_outlier[1] < at_outlier[0]


@quick
@bits_and_seeds
def test_refit_never_increases_the_squared_error(bits, seed, tails):
    x = rows(seed, tails, shape=(12, 48))
    column_scale = rows(seed + 1, shape=(1, 48)).abs() + 0.1
    scale, zero_point = search_grid(x / column_scale, bits, power=2)
    codes = encode(x / column_scale, scale, zero_point, bits)

    def squared(s, z, c):
        return ((codes * s + z).double() * c.double() - x.double()).square()

    before = squared(scale, zero_point, column_scale)
    # What float32 cannot resolve: errors far below the row's own energy.
    noise = 1e-9 * x.double().square()
    scale, zero_point = refit_grid(x, codes, column_scale, scale, zero_point)
    assert (scale > 0).all()
    after = squared(scale, zero_point, column_scale)
    assert (after.sum(-1) <= before.sum(-1) * (1 + 1e-4) + noise.sum(-1)).all()
    column_scale = refit_columns(x, codes * scale + zero_point, column_scale)
    assert (column_scale > 0).all()
    last = squared(scale, zero_point, column_scale)
    assert (last.sum(-2) <= after.sum(-2) * (1 + 1e-4) + noise.sum(-2)).all()


def test_refit_finds_the_exact_grid():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 4, (8, 64), generator=generator).float()
    column_scale = torch.rand(1, 64, generator=generator) + 0.5
    scale, zero_point = torch.rand(8, 1, generator=generator) + 0.1, torch.randn(8, 1, generator=generator)
    x = column_scale * (codes * scale + zero_point)
    found = refit_grid(x, codes, column_scale, torch.ones(8, 1), torch.zeros(8, 1))
    torch.testing.assert_close(found, (scale, zero_point), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(refit_columns(x, codes * scale + zero_point, torch.ones(1, 64)), column_scale)


def test_refit_keeps_what_it_cannot_solve():
    scale, zero_point, column_scale = torch.full((3, 1), 0.7), torch.full((3, 1), -0.2), torch.ones(1, 16)
    same_codes = torch.full((3, 16), 2.0)  # scale and zero point cannot be told apart
    falling = torch.arange(16.0).expand(3, 16)  # the best scale would be negative
    for x, codes in ((rows(0, shape=(3, 16)), same_codes), (-falling, falling)):
        kept = refit_grid(x, codes, column_scale, scale, zero_point)
        assert torch.equal(kept[0], scale)
        assert torch.equal(kept[1], zero_point)
    assert torch.equal(refit_columns(rows(0, shape=(3, 16)), torch.zeros(3, 16), column_scale), column_scale)
    assert torch.equal(refit_columns(-falling, falling, column_scale), column_scale)


@pytest.mark.parametrize("bits", BIT_WIDTHS)
@pytest.mark.parametrize("value", [0.0, 1.0, -7.25, 3e-30])
def test_constant_rows_are_exact(bits, value):
    x = torch.full((2, 64), value)
    for scale, zero_point in (full_range_grid(x, bits), search_grid(x, bits, 2), search_grid(x, bits, 4)):
        assert (scale > 0).all()
        codes = encode(x, scale, zero_point, bits)
        assert (codes == 0).all()
        assert torch.equal(codes * scale + zero_point, x)


@pytest.mark.parametrize("bits", BIT_WIDTHS)
def test_rows_with_a_single_outlier(bits):
    x = torch.zeros(1, 64)
    x[0, 9] = 1e4
    for power in (2, 4):
        scale, zero_point = search_grid(x, bits, power)
        x_hat = encode(x, scale, zero_point, bits) * scale + zero_point
        assert x_hat.isfinite().all()
        assert x_hat[0, 9] == x_hat.max()


def test_few_codes_of_8_bits_move_when_their_grid_becomes_float16():
    x = rows(6, shape=(1024, 128))
    grid = full_range_grid(x, 8)
    moved = encode(x, *grid, 8) != encode(x, *(t.half().float() for t in grid), 8)
    assert moved.float().mean() < 0.015  # 0.03 if they counted from the minimum


def test_rows_do_not_mix():
    x = rows(5)
    together = search_grid(x, 3, 4)
    for i in range(x.shape[0]):
        alone = search_grid(x[i : i + 1], 3, 4)
        torch.testing.assert_close((together[0][i], together[1][i]), (alone[0][0], alone[1][0]), rtol=1e-6, atol=0)


def test_norm_ratio():
    x, x_hat = torch.tensor([[3.0, 4.0], [3.0, 4.0], [0.0, 0.0], [3.0, 4.0], [3.0, 4.0]]), torch.zeros(5, 2)
    x_hat[0], x_hat[1], x_hat[2] = torch.tensor([4.0, 4.0]), 100.0, 1.0
    x_hat[3] = torch.tensor([0.1, 0.0])
    ratio = norm_ratio(x, x_hat, dim=-1)
    assert ratio.shape == (5, 1)
    torch.testing.assert_close(ratio[:, 0], torch.tensor([5 / 32**0.5, 0.5, 1.0, 2.0, 1.0]))
    torch.testing.assert_close(norm_ratio(x.mT, x_hat.mT, dim=-2), ratio.mT)
