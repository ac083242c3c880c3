"""The quantizing kernel against the torch path, its definition."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvarn_hf.config import METHODS, KVarNConfig
from kvarn_hf.method import quantize as reference_quantize
from kvarn_hf.method import rounding as reference_rounding
from kvarn_kernels import Scheme, quantize, rounding
from tests.kernels import cases

BITS = ((4, 2), (2, 2), (3, 2), (8, 4), (4, 3), (2, 8))
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256, 512)


def check(keys, values, config, **kwargs):
    """Codes equal except at rounding ties, and no larger an error than the torch path's.

    Where a scale itself falls on a tie of float16, a few codes of its row move by one.
    """
    slot = kwargs.get("slot", 0)
    expected, actual, prescale = cases.quantize_both(keys, values, config, **kwargs)
    pairs = zip(cases.codes_of(expected, config, slot), cases.codes_of(actual, config, slot), strict=True)
    widths = {"key": config.key_bits, "value": config.value_bits}
    for (want, got), (name, bits) in zip(pairs, widths.items(), strict=True):
        difference = (want - got).abs()
        assert difference.max() <= 1, f"{name} codes differ by {difference.max()}"
        count = (difference > 0).sum().item()
        assert count <= max(1e-4 * want.numel(), bits), f"{count} of {want.numel()} {name} codes differ"
    if kwargs.get("first") is None:
        check_error(expected, actual, prescale, keys, values, config, slot)
    return actual, prescale


def check_error(expected, actual, prescale, keys, values, config, slot=0):
    expected, actual = (cases.dequantized(tiles, prescale, config, slot) for tiles in (expected, actual))
    for want, got, original in zip(expected, actual, (keys, values), strict=True):
        assert cases.error(got, original) <= 1.1 * cases.error(want, original) + 1e-7


@pytest.mark.parametrize("method", METHODS)
def test_methods(device, method):
    config = KVarNConfig(method=method, tile_size=64)
    keys = cases.tokens((1, 1, 128, 64), torch.bfloat16, device)
    values = cases.tokens((1, 1, 128, 64), torch.bfloat16, device, seed=1, outlier_channel=3)
    check(keys, values, config)


@pytest.mark.parametrize(("key_bits", "value_bits"), BITS)
def test_bits(device, key_bits, value_bits):
    config = KVarNConfig(key_bits=key_bits, value_bits=value_bits, tile_size=64)
    x = cases.tokens((1, 1, 64, 64), torch.float16, device)
    check(x, x, config)


@pytest.mark.parametrize("head_dim", [8, 16, 80, 112, 192])
def test_head_dims(device, head_dim):
    x = cases.tokens((1, 1, 64, head_dim), torch.bfloat16, device)
    check(x, x, KVarNConfig(tile_size=64))


def test_keys_and_values_of_different_head_dim(device):
    keys, values = (cases.tokens((1, 2, 128, dim), torch.float32, device) for dim in (96, 64))
    check(keys, values, KVarNConfig())


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(device, dtype):
    x = cases.tokens((1, 1, 64, 128), dtype, device)
    check(x, x, KVarNConfig(tile_size=64))
    check(x, x, KVarNConfig(tile_size=64, method="hadamard"))


def test_strides_do_not_matter(device):
    config = KVarNConfig(tile_size=64)
    x = cases.tokens((1, 2, 64, 16), torch.float16, device)
    plain, _ = check(x, x, config)
    interleaved = x.transpose(1, 2).contiguous().transpose(1, 2)
    channels_first = x.mT.contiguous().mT
    for view in (interleaved, channels_first, x.repeat_interleave(2, 2)[:, :, ::2]):
        strided, _ = check(view, view, config)
        for a, b in zip(plain.parts.values(), strided.parts.values(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_writes_behind_the_filled_slots(device):
    x = cases.tokens((2, 1, 128, 16), torch.float32, device)
    check(x, x, KVarNConfig(tile_size=64), slot=2)


def test_tiles_do_not_depend_on_how_many_come_together(device):
    config = KVarNConfig(tile_size=64, method="published")
    x = cases.tokens((1, 1, 192, 32), torch.float32, device)
    together, _ = check(x, x, config)
    for i in range(3):
        alone, _ = check(x[:, :, 64 * i : 64 * (i + 1)], x[:, :, 64 * i : 64 * (i + 1)], config)
        for a, b in zip(together.parts.values(), alone.parts.values(), strict=True):
            torch.testing.assert_close(a[:, :, i], b[:, :, 0], rtol=0, atol=0, equal_nan=True)


def test_tokens_before_the_first_that_counts_are_replaced(device):
    config = KVarNConfig(tile_size=64, method="hadamard")
    x = cases.tokens((4, 1, 128, 16), torch.float32, device)
    first = torch.tensor([0, 70, 130, 400], device=device)
    check(x, x, config, position=64, first=first)


EASY = {
    "zero": lambda x: x * 0,
    "constant": lambda x: torch.full_like(x, 0.3),
    "constant tokens": lambda x: x[:, :, :1].expand_as(x),
    "constant channels": lambda x: x[..., :1].expand_as(x),
}
HARD = {
    "huge": lambda x: x.clamp(-3, 3) * (1e5 / 3),
    "tiny": lambda x: x * 1e-12,
    "outlier token": lambda x: x.index_fill(2, torch.tensor([5], device=x.device), 1000.0),
    "outlier channel": lambda x: x.index_fill(3, torch.tensor([7], device=x.device), 300.0) + x,
    "outlier element": lambda x: x + 1e4 * (torch.arange(x.numel(), device=x.device).view_as(x) == 777),
}


@pytest.mark.parametrize("case", [*EASY, *HARD])
@pytest.mark.parametrize("method", ["kvarn", pytest.param("published", marks=pytest.mark.gpu)])
def test_hard_tiles(device, case, method):
    x = {**EASY, **HARD}[case](cases.tokens((1, 1, 64, 64), device=device, outlier_channel=2)).bfloat16()
    config = KVarNConfig(tile_size=64, method=method)
    if case in HARD:
        check(x, x, config)
    expected, actual, prescale = cases.quantize_both(x, x, config)
    for want, got in zip(*(cases.dequantized(t, prescale, config) for t in (expected, actual)), strict=True):
        assert got.isfinite().all()
        if case in EASY:  # what is left is rounding noise, and may differ
            assert (got - x).norm() <= 1.1 * (want - x).norm() + 1e-3 * x.norm()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_token_breaks_no_other(device, bad):
    config = KVarNConfig(tile_size=64)
    x = cases.tokens((1, 1, 64, 64), torch.float16, device)
    broken, without = x.clone(), x.clone()
    broken[0, 0, 9, 3] = bad
    without[0, 0, 9] = 0
    prescale = torch.ones(1, 1, 64, device=device, dtype=torch.float16)
    want, got = (cases.dequantized(cases.quantize_both(t, t, config)[1], prescale, config) for t in (without, broken))
    others = torch.arange(64, device=device) != 9
    for a, b in zip(want, got, strict=True):
        assert b[0, 0, 9].isnan().all()
        assert torch.equal(a[0, 0, others], b[0, 0, others])


def _covering():
    """Every pair of neighbouring settings at least once; all combinations would compile for an hour."""
    bits, dtypes, methods, sizes = (itertools.cycle(x) for x in (BITS, DTYPES, METHODS, (128, 64)))
    for head_dim in HEAD_DIMS + HEAD_DIMS[::-1]:
        yield head_dim, *next(bits), next(dtypes), next(methods), next(sizes)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "key_bits", "value_bits", "dtype", "method", "tile_size"), list(_covering()))
def test_many_tiles(head_dim, key_bits, value_bits, dtype, method, tile_size):
    config = KVarNConfig(key_bits=key_bits, value_bits=value_bits, method=method, tile_size=tile_size)
    keys = cases.tokens((1, 2, 10 * tile_size, head_dim), dtype, "cuda", outlier_channel=10)
    values = cases.tokens((1, 2, 10 * tile_size, head_dim), dtype, "cuda", seed=1, outlier_channel=3)
    check(keys, values, config)


@pytest.mark.gpu
@pytest.mark.parametrize(("key_bits", "value_bits"), [(4, 2), (8, 8)])
def test_300_tiles(key_bits, value_bits):
    keys, values = (cases.tokens((2, 8, 300 * 128, 128), torch.bfloat16, "cuda", seed) for seed in (0, 1))
    check(keys, values, KVarNConfig(key_bits=key_bits, value_bits=value_bits))


@pytest.mark.gpu
def test_addresses_beyond_32_bits():
    config = KVarNConfig()
    size, heads = config.tile_size, 8
    wide = torch.empty(1, 2 * size, heads, 1 << 21, dtype=torch.bfloat16, device="cuda")  # stride of a token: 2**24
    x = wide[..., :128].transpose(1, 2)
    x.copy_(cases.tokens(x.shape, torch.bfloat16, "cuda"))
    check(x, x, config)


@pytest.mark.parametrize("dim", [96, 128])
def test_gpus_with_little_shared_memory(monkeypatch, device, dim):
    """They read the channels in chunks, as all GPUs do for larger head_dims, and compute the same."""
    quantize.tile_form.cache_clear()
    monkeypatch.setattr(quantize, "shared_memory", lambda device: 99 << 10)
    rotated, plain = (quantize.tile_form(128, dim, 64, Scheme(4, 2, method, 8), None) for method in ("kvarn", "rtn"))
    assert (rotated.KEYS.CHUNK, rotated.VALUES.CHUNK, plain.KEYS.CHUNK) == (64, 64, 128)
    keys, values = (cases.tokens((1, 1, 128, dim), torch.float16, device, seed) for seed in (0, 1))
    check(keys, values, KVarNConfig())
    quantize.tile_form.cache_clear()


def test_constants_are_those_of_the_reference():
    assert rounding.CLIP_SEARCH == reference_rounding.CLIP_SEARCH
    assert quantize.VALUE_ROUNDS == reference_quantize.VALUE_ROUNDS
