"""The dequantizing kernel against the torch path of :func:`kvarn_hf.ops.dense`."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvarn_hf import ops
from kvarn_hf.config import METHODS, KVarNConfig
from kvarn_hf.method import quantize as reference
from kvarn_hf.ops import dispatch
from kvarn_hf.state.layer_state import LayerState
from tests.kernels import cases

BITS = ((4, 2), (2, 2), (3, 3), (8, 8))
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256, 512)


def state_of(keys, values, config, indices=None):
    """The tokens in a layer's state, quantized by the torch path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "uses_kernels", lambda device: False)
        state = ops.commit(LayerState.empty(config, keys, values).appended(keys, values))
    return state if indices is None else state.index_select(torch.tensor(indices, device=keys.device))


def by_torch(state):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "uses_kernels", lambda device: False)
        return ops.dense(state)


def by_kernel(state):
    from kvarn_kernels import dequantize_tiles

    return dequantize_tiles(ops.held(state))


def check(state):
    """Sinks, tail and padding bit for bit; tiles to the last bit of the result and of float16."""
    for name, want, got in zip(("keys", "values"), by_torch(state), by_kernel(state), strict=True):
        assert got.shape == want.shape and got.dtype == want.dtype and got.is_contiguous()
        sink, tail = state.config.sink_length, state.tail_start
        assert torch.equal(want[:, :, :sink], got[:, :, :sink]), name
        assert torch.equal(want[:, :, tail:], got[:, :, tail:]), name
        assert torch.equal(want.isnan(), got.isnan()), name
        norm = want[:, :, sink:tail].nan_to_num().float().norm(dim=-1, keepdim=True)
        peak = (
            norm.unflatten(2, (-1, state.config.tile_size))
            .amax(3, keepdim=True)
            .expand(-1, -1, -1, state.config.tile_size, -1)
        )
        resolution = torch.finfo(want.dtype).eps
        if want.dtype == torch.bfloat16 and want.device.type == "cpu":
            resolution *= 2  # the interpreter cuts bfloat16 off instead of rounding it
        # Tensor cores take the tile in float16, before the rotation: to 2**-11 of its largest entry.
        allowed = resolution * norm + 2.0**-11 * (peak.flatten(2, 3) if want.is_cuda else norm)
        difference = (want - got)[:, :, sink:tail].nan_to_num().float().abs()
        assert (difference <= allowed).all(), f"{name}: {(difference / allowed).max():.1e} of what is allowed"


def filled(shape, value_dim=None, dtype=torch.float32, device="cpu", **kwargs):
    batch, heads, length, key_dim = shape
    keys = cases.tokens(shape, dtype, device, outlier_channel=10)
    values = cases.tokens((batch, heads, length, value_dim or key_dim), dtype, device, seed=1, outlier_channel=3)
    config = KVarNConfig(**{"tile_size": 64, "sink_length": 20, "residual_length": 10, **kwargs})
    return keys, values, config


@pytest.mark.parametrize("method", METHODS)
def test_methods(device, method):
    check(state_of(*filled((1, 1, 200, 64), device=device, method=method)))


@pytest.mark.parametrize(("key_bits", "value_bits"), BITS)
def test_bits(device, key_bits, value_bits):
    check(state_of(*filled((1, 1, 200, 64), device=device, key_bits=key_bits, value_bits=value_bits)))


@pytest.mark.parametrize("head_dim", [8, 80, 112, 192, 256])
def test_head_dims(device, head_dim):
    check(state_of(*filled((1, 1, 200, head_dim), device=device)))


def test_keys_and_values_of_different_head_dim(device):
    check(state_of(*filled((1, 2, 400, 192), 128, device=device, tile_size=128)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(device, dtype):
    check(state_of(*filled((1, 1, 200, 128), dtype=dtype, device=device)))


@pytest.mark.parametrize("sink_length", [0, 1, 100])
def test_sinks(device, sink_length):
    check(state_of(*filled((1, 1, 300, 64), device=device, sink_length=sink_length)))


@pytest.mark.parametrize("residual_length", [0, 63])
def test_no_tail_and_a_tail_that_fills_a_tile(device, residual_length):
    check(state_of(*filled((1, 1, 20 + 128 + residual_length, 64), device=device, residual_length=residual_length)))


def test_rows_are_mapped(device):
    check(state_of(*filled((3, 1, 120, 16), device=device), indices=[2, 0, 2, 1]))


@pytest.mark.parametrize("sink_length", [0, 20])
@pytest.mark.parametrize("indices", [None, [2, 2, 1, 0]])
def test_left_padding(device, sink_length, indices):
    keys, values, config = filled((3, 1, 250, 16), device=device, sink_length=sink_length)
    for row, length in enumerate((0, 70, 190)):
        for x in (keys, values):
            x[row, :, :length] = x[row, :, :1]
    state = state_of(keys, values, config, indices)
    assert state.padding is not None
    check(state)


def test_broken_token(device):
    keys, values, config = filled((1, 1, 200, 64), device=device)
    keys[0, 0, 50, 3] = values[0, 0, 60, 4] = torch.nan
    check(state_of(keys, values, config))


@pytest.mark.parametrize("scale", [1e5 / 300, 1e-9, 1e30])
def test_magnitudes(device, scale):
    keys, values, config = filled((1, 1, 200, 64), device=device)
    check(state_of((keys * scale).bfloat16(), (values * scale).bfloat16(), config))


def test_strided_dense_tokens(device):
    keys, values, config = filled((1, 2, 200, 64), device=device)
    state = state_of(keys, values, config)
    plain = by_kernel(state)
    dense = state.dense
    for name in ("key_buffer", "value_buffer"):
        object.__setattr__(dense, name, getattr(dense, name).transpose(1, 2).contiguous().transpose(1, 2))
    assert all(map(torch.equal, plain, by_kernel(state)))


@pytest.mark.parametrize(("key_bits", "value_bits"), [(4, 2), (8, 8)])
def test_error_against_the_original(device, key_bits, value_bits):
    dtype = torch.float16
    keys, values, config = filled(
        (1, 1, 200, 128), dtype=dtype, device=device, key_bits=key_bits, value_bits=value_bits
    )
    keys += 20 * torch.randn(128, device=device).to(dtype)  # a mean far above the deviation, as a key bias gives
    state = state_of(keys, values, config)
    packed_keys, packed_values = state.tiles.filled()
    expected = (
        reference.dequantize_keys(packed_keys, state.prescale.unsqueeze(2), config).flatten(2, 3),
        reference.dequantize_values(packed_values, config).flatten(2, 3),
    )
    for x, want, got in zip((keys, values), expected, by_kernel(state), strict=True):
        sink, tail = config.sink_length, state.tail_start
        original = x[:, :, sink:tail]
        assert cases.error(got[:, :, sink:tail], original) <= 1.1 * cases.error(want.to(dtype), original)


def _covering():
    bits, dtypes, methods, sizes = (itertools.cycle(x) for x in (BITS, DTYPES, ("kvarn", "rtn"), (128, 64, 128)))
    for head_dim in HEAD_DIMS:
        yield head_dim, *next(bits), next(dtypes), next(methods), next(sizes)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "key_bits", "value_bits", "dtype", "method", "tile_size"), list(_covering()))
def test_many_tiles(head_dim, key_bits, value_bits, dtype, method, tile_size):
    settings = {"key_bits": key_bits, "value_bits": value_bits, "method": method, "tile_size": tile_size}
    check(state_of(*filled((2, 2, 12 * tile_size + 40, head_dim), dtype=dtype, device="cuda", **settings)))


@pytest.mark.gpu
def test_300_tiles_and_left_padding():
    keys, values, config = filled((2, 8, 300 * 128 + 50, 128), dtype=torch.bfloat16, device="cuda", tile_size=128)
    keys[1, :, :1000], values[1, :, :1000] = keys[1, :, :1], values[1, :, :1]
    check(state_of(keys, values, config))
