"""Codes to bytes and back: every width and size, and the exact bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvarn_hf.config import BIT_WIDTHS, TILE_SIZES
from kvarn_hf.method.packing import pack_keys, pack_values, unpack_keys, unpack_values

PLANES = {2: [(0, 2)], 3: [(0, 2), (2, 1)], 4: [(0, 4)], 8: [(0, 8)]}


def random_codes(bits, *shape, seed=0):
    return torch.randint(0, 2**bits, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    bits=st.sampled_from(BIT_WIDTHS),
    tile_size=st.sampled_from(TILE_SIZES),
    head_dim=st.integers(1, 64).map(lambda n: 8 * n),
    lead=st.lists(st.integers(0, 3), max_size=3),
    seed=st.integers(0, 2**16),
)
def test_round_trip(bits, tile_size, head_dim, lead, seed):
    codes = random_codes(bits, *lead, tile_size, head_dim, seed=seed)
    keys, values = pack_keys(codes, bits), pack_values(codes, bits)
    assert keys.dtype == values.dtype == torch.uint8
    assert keys.shape == (*lead, tile_size * bits // 8, head_dim)
    assert values.shape == (*lead, head_dim * bits // 8, tile_size)
    assert torch.equal(unpack_keys(keys, bits), codes)
    assert torch.equal(unpack_values(values, bits), codes)


@pytest.mark.parametrize("bits", BIT_WIDTHS)
def test_every_code_of_every_width(bits):
    codes = (torch.arange(64)[:, None] + torch.arange(32)[None]).remainder(2**bits).to(torch.uint8)
    for pack, unpack in ((pack_keys, unpack_keys), (pack_values, unpack_values)):
        assert torch.equal(unpack(pack(codes, bits), bits), codes)
        for code in range(2**bits):
            assert (unpack(pack(torch.full_like(codes, code), bits), bits) == code).all()


@pytest.mark.parametrize("tile_size", TILE_SIZES)
@pytest.mark.parametrize("bits", BIT_WIDTHS)
def test_keys_lie_where_documented(bits, tile_size):
    """Byte [j, d] of a plane holds, at bits [b i, b i + b), the code of channel d, token j + i tile_size b / 8."""
    head_dim = 24
    codes = random_codes(bits, tile_size, head_dim)
    packed, start = pack_keys(codes, bits), 0
    for low, width in PLANES[bits]:
        rows = tile_size * width // 8
        for i in range(8 // width):
            for j in range(rows):
                expected = [(int(c) >> low) % 2**width for c in codes[j + i * rows]]
                assert [(int(b) >> (width * i)) % 2**width for b in packed[start + j]] == expected
        start += rows
    assert start == packed.shape[0]


@pytest.mark.parametrize("head_dim", [8, 24, 80, 128])
@pytest.mark.parametrize("bits", BIT_WIDTHS)
def test_values_lie_where_documented(bits, head_dim):
    """Byte [e, t] of a plane holds, at bits [b i, b i + b), the code of token t, channel e 8 / b + i."""
    codes = random_codes(bits, 64, head_dim)
    packed, start = pack_values(codes, bits), 0
    for low, width in PLANES[bits]:
        per_byte = 8 // width
        for e in range(head_dim // per_byte):
            for i in range(per_byte):
                expected = [(int(c) >> low) % 2**width for c in codes[:, e * per_byte + i]]
                assert [(int(b) >> (width * i)) % 2**width for b in packed[start + e]] == expected
        start += head_dim // per_byte
    assert start == packed.shape[0]


@pytest.mark.parametrize("bits", BIT_WIDTHS)
def test_any_strides(bits):
    codes = random_codes(bits, 2, 64, 48)
    strided = codes.mT.contiguous().mT
    assert not strided.is_contiguous()
    for pack, unpack in ((pack_keys, unpack_keys), (pack_values, unpack_values)):
        packed = pack(codes, bits)
        assert torch.equal(pack(strided, bits), packed)
        assert torch.equal(unpack(packed.mT.contiguous().mT, bits), codes)
        assert torch.equal(unpack(torch.stack([packed, packed], -1)[..., 0], bits), codes)
