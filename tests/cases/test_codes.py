"""What people hit with quantized KV caches elsewhere: codes, strides and baselines.

Numbers are those of the list the cases come from.
"""

from __future__ import annotations

import pytest
import torch

from kvarn_hf.method import packing
from tests.cases.small import SMALL, codes, filled, random_kv, read, relative_error

# --- 15: a mask of two bits on wider codes; asymmetric settings without effect ---


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_15_every_code_round_trips(bits):
    every = torch.arange(64 * 32, dtype=torch.int64).mul_(7).remainder_(2**bits).to(torch.uint8).reshape(1, 64, 32)
    assert every.unique().numel() == 2**bits
    assert torch.equal(packing.unpack_keys(packing.pack_keys(every, bits), bits), every)
    assert torch.equal(packing.unpack_values(packing.pack_values(every, bits), bits), every)


def test_15_value_bits_change_values_alone():
    keys, values = random_kv(1, 2, 300, 64)
    caches = [filled(keys, values, SMALL.replace(value_bits=bits)) for bits in (2, 3, 4, 8)]
    for cache in caches[1:]:
        assert torch.equal(codes(cache.layers[0])[0], codes(caches[0].layers[0])[0])
    value_errors = [relative_error(read(cache)[1], values) for cache in caches]
    assert value_errors == sorted(value_errors, reverse=True)
    assert value_errors[0] > 20 * value_errors[-1]
    key_errors = [relative_error(read(filled(keys, values, SMALL.replace(key_bits=b)))[0], keys) for b in (2, 3, 4, 8)]
    assert key_errors == sorted(key_errors, reverse=True)


# --- 19: non-contiguous keys and values give other codes ---


def test_19_strides_do_not_matter():
    keys, values = (x.transpose(1, 2) for x in random_kv(1, 300, 4, 128))
    assert not keys.is_contiguous()
    cache, other = filled(keys, values), filled(keys.contiguous(), values.contiguous())
    assert all(torch.equal(x, y) for x, y in zip(codes(cache.layers[0]), codes(other.layers[0]), strict=True))
    assert all(torch.equal(x, y) for x, y in zip(read(cache), read(other), strict=True))


# --- 21: gains shown against a baseline without sinks and tail ---


@pytest.mark.parametrize("method", ["rtn", "hadamard", "published"])
def test_21_baselines_have_the_same_regions_and_bytes(method):
    keys, values = random_kv(1, 2, 300, 64)
    ours, baseline = filled(keys, values), filled(keys, values, SMALL.replace(method=method))
    for key in ("sink_tokens", "packed_tokens", "tail_tokens", "tiles"):
        assert ours.report()[key] == baseline.report()[key]
    prescale = ours.layers[0].state.prescale
    assert ours.memory_footprint() == baseline.memory_footprint() + prescale.untyped_storage().nbytes()
    for x, given in zip(read(baseline), (keys, values), strict=True):
        assert torch.equal(x[:, :, :16], given[:, :, :16])
        assert torch.equal(x[:, :, -16:], given[:, :, -16:])
