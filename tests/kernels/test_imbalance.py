"""The monitor's kernel against the reference."""

from __future__ import annotations

import pytest
import torch

from kvarn_hf.method.normalize import imbalance_trace as reference
from kvarn_kernels.imbalance import imbalance_trace
from tests.kernels import cases


def check(tiles, rounds, relative):
    got = imbalance_trace(tiles, rounds, relative)
    assert got.dtype == torch.float32
    assert got.shape == (*tiles.shape[:-2], rounds + 1)
    expected = reference(tiles.double(), rounds, relative=relative)
    in_float = reference(tiles, rounds, relative=relative)
    assert ((got - expected).abs() <= 4 * (in_float - expected).abs() + 1e-5 * expected).all()


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("rounds", [0, 2, 11])
def test_rounds(device, rounds, relative):
    check(cases.tokens((2, 2, 64, 64), device=device), rounds, relative)


@pytest.mark.parametrize("sides", [(64, 8), (64, 80), (128, 112), (64, 192), (8, 512)])
@pytest.mark.parametrize("transposed", [False, True])
def test_sides(device, sides, transposed):
    tiles = cases.tokens((1, 2, *sides), device=device)
    check(tiles.mT if transposed else tiles, 3, True)


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("magnitude", [1e-6, 1e4])
def test_magnitudes(device, magnitude, relative):
    check(cases.tokens((1, 1, 64, 64), device=device) * magnitude, 4, relative)


def test_a_mean_that_dwarfs_the_deviation(device):
    check(cases.tokens((1, 1, 64, 64), device=device) + 1e3, 4, True)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_constant_tiles_are_even(device, value):
    tiles = torch.full((1, 1, 16, 16), value, device=device)
    assert torch.equal(imbalance_trace(tiles, 2, True), torch.full((1, 1, 3), 2.0, device=device))


def test_one_tile_and_none(device):
    tile = cases.tokens((1, 1, 64, 64), device=device)[0, 0]
    check(tile, 2, True)
    assert imbalance_trace(tile[None][:0], 2, True).shape == (0, 3)
