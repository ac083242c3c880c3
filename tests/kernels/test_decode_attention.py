"""The fused decode attention against float64 attention over the dequantized values."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvarn_hf import ops
from kvarn_hf.config import KVarNConfig
from kvarn_hf.method.attention import attention
from kvarn_hf.ops import dispatch
from kvarn_hf.state.layer_state import LayerState
from tests.kernels import cases

BITS = ((4, 2), (2, 2), (3, 2), (4, 4), (8, 4), (4, 3), (2, 8))


def make_state(config, device, dtype, shape=(2, 2), tiles=3, extra=5, key_dim=64, value_dim=None, pads=None, seed=0):
    """A layer's state with ``tiles`` packed tiles, in ``dtype``; ``pads`` gives each row's left padding."""
    length = config.sink_length + tiles * config.tile_size + config.residual_length + extra
    keys = cases.tokens((*shape, length, key_dim), dtype, device, seed)
    values = cases.tokens((*shape, length, value_dim or key_dim), dtype, device, seed + 1, outlier_channel=3.0)
    for row, pad in enumerate(pads or ()):
        keys[row, :, :pad], values[row, :, :pad] = keys[row, :, :1], values[row, :, :1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "uses_kernels", lambda device: False)
        state = ops.commit(LayerState.empty(config, keys, values).appended(keys, values))
    assert state.count == tiles
    return state


def dequantized(state):
    """Keys and values in float32, not rounded to the model's dtype."""
    dense = dataclasses.replace(
        state.dense, key_buffer=state.dense.key_buffer.float(), value_buffer=state.dense.value_buffer.float()
    )
    padding = state.padding
    if padding is not None:
        padding = dataclasses.replace(padding, key=padding.key.float(), value=padding.value.float())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "uses_kernels", lambda device: False)
        return ops.dense(dataclasses.replace(state, dense=dense, padding=padding))


def by_kernel(state, query, mask=None, **options):
    from kvarn_kernels.decode_attention import decode_attention

    options = {"scaling": query.shape[-1] ** -0.5, **options}
    return decode_attention(query, ops.held(state), mask, **options)


def make_query(state, heads, tokens=1, seed=7, size=1.0):
    batch, _, _, dim = state.dense.key_buffer.shape
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, heads, tokens, dim, generator=generator) * size
    return query.to(device=state.dense.key_buffer.device, dtype=state.dense.key_buffer.dtype)


def check(state, query, mask=None, launch=None, **options):
    """At most twice the error of bfloat16 attention over the same values, per query."""
    keys, values = dequantized(state)
    options = {"scaling": query.shape[-1] ** -0.5, **options}
    want = attention(query, keys, values, mask, **options)
    got = by_kernel(state, query, mask, **options, **(launch or {}))
    assert got.shape == want.shape and got.dtype == query.dtype and got.is_contiguous()
    error = (got.double() - want).norm() / want.norm()
    low = torch.bfloat16
    rounded = attention(query.to(low), keys.to(low), values.to(low), mask, **options)
    if options.get("softcap") is None and options.get("sinks") is None and options.get("sliding_window") is None:
        groups = query.shape[1] // keys.shape[1]
        full = torch.ones(query.shape[2], keys.shape[2], dtype=torch.bool, device=query.device)
        full = full if mask is None else mask[..., : keys.shape[2]]
        if mask is None and options.get("causal", True):
            full = full.tril(keys.shape[2] - query.shape[2])
        rounded = torch.nn.functional.scaled_dot_product_attention(
            query.to(low),
            keys.to(low).repeat_interleave(groups, 1),
            values.to(low).repeat_interleave(groups, 1),
            full if full.dtype == torch.bool else full.to(low),
            scale=options["scaling"],
        ).transpose(1, 2)
    bound = (rounded.double() - want).norm() / want.norm()
    assert error <= 2 * bound, (error.item(), bound.item())
    return got


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("tile_size", (64, 128))
def test_bit_widths(device, bits, tile_size):
    config = KVarNConfig(*bits, tile_size=tile_size, sink_length=16, residual_length=8)
    state = make_state(config, device, torch.float16)
    check(state, make_query(state, heads=4))


@pytest.mark.parametrize(
    "key_dim, value_dim",
    ((64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 192), (256, 256), (192, 128), (64, 96), (32, 16)),
)
def test_head_dims(device, key_dim, value_dim):
    config = KVarNConfig(tile_size=64, sink_length=16, residual_length=8)
    state = make_state(config, device, torch.float16, shape=(1, 2), tiles=2, key_dim=key_dim, value_dim=value_dim)
    check(state, make_query(state, heads=4))


@pytest.mark.parametrize("heads, tokens", ((2, 1), (6, 1), (14, 1), (20, 1), (4, 3), (8, 5), (2, 16)))
def test_query_heads_and_tokens(device, heads, tokens):
    config = KVarNConfig(tile_size=64, sink_length=16, residual_length=16)
    state = make_state(config, device, torch.float16)
    check(state, make_query(state, heads, tokens))
    check(state, make_query(state, heads, tokens), causal=False)


@pytest.mark.parametrize("method", ("published", "hadamard", "rtn"))
def test_methods(device, method):
    config = KVarNConfig(method=method, tile_size=64, sink_length=16, residual_length=8)
    state = make_state(config, device, torch.float16)
    check(state, make_query(state, heads=4))


def test_new_tokens_inside_tiles(device):
    """With no residual tokens, even the newest may be packed: they still see nothing behind them."""
    config = KVarNConfig(tile_size=64, sink_length=16, residual_length=0)
    state = make_state(config, device, torch.float16, extra=1)
    check(state, make_query(state, heads=2, tokens=4))


def test_no_sinks(device):
    config = KVarNConfig(tile_size=64, sink_length=0, residual_length=8)
    state = make_state(config, device, torch.float16)
    check(state, make_query(state, heads=2))


@pytest.mark.parametrize("kind", (torch.bool, torch.float16, torch.float32))
@pytest.mark.parametrize("pads", (None, (3, 90)))
@pytest.mark.parametrize("mask_heads", (1, 4))
def test_masks(device, kind, pads, mask_heads):
    config = KVarNConfig(tile_size=64, sink_length=16, residual_length=8)
    state = make_state(config, device, torch.float16, pads=pads)
    query = make_query(state, heads=4, tokens=2)
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(2, mask_heads, 2, state.length + 3, generator=generator) < 0.7
    for row, pad in enumerate(pads or ()):
        mask[row, :, :, : pad - 1] = False
    if kind != torch.bool:
        mask = torch.where(mask, torch.rand(mask.shape, generator=generator), torch.finfo(kind).min).to(kind)
    check(state, query, mask.to(device))


@pytest.mark.parametrize("pads", ((0, 40), (20, 150), (1, 230)))
def test_padding_that_is_seen(device, pads):
    config = KVarNConfig(tile_size=64, sink_length=16, residual_length=8)
    state = make_state(config, device, torch.float16, pads=pads)
    check(state, make_query(state, heads=4))
    check(state, make_query(state, heads=4, tokens=2), sliding_window=120)


def test_a_padded_row_gives_what_it_gives_alone(device):
    config = KVarNConfig(tile_size=64, sink_length=16, residual_length=8)
    pad = 64
    alone = make_state(config, device, torch.float16, shape=(1, 2), tiles=3)
    keys, values = (torch.cat([x, x[:, :, -1:]], 2)[:, :, :-1] for x in (alone.dense.keys, alone.dense.values))
    length = alone.length
    keys = cases.tokens((1, 2, length, 64), torch.float16, device, 0)
    values = cases.tokens((1, 2, length, 64), torch.float16, device, 1, outlier_channel=3.0)
    padded = []
    for x in (keys, values):
        other = torch.randn(1, 2, length + pad, 64, generator=torch.Generator().manual_seed(9)).to(x)
        padded.append(torch.cat([torch.cat([x[:, :, :1].expand(-1, -1, pad, -1) * 0 + 2, x], 2), other]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "uses_kernels", lambda device: False)
        both = ops.commit(LayerState.empty(config, *padded).appended(*padded))
    query = make_query(alone, heads=4)
    mask = torch.ones(2, 1, 1, length + pad, dtype=torch.bool, device=device)
    mask[0, :, :, :pad] = False
    together = by_kernel(both, torch.cat([query, query]), mask)[:1]
    torch.testing.assert_close(together, by_kernel(alone, query), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("window", (1, 30, 150, 1000))
def test_sliding_window(device, window):
    config = KVarNConfig(tile_size=64, sink_length=16, residual_length=8)
    state = make_state(config, device, torch.float16)
    check(state, make_query(state, heads=4, tokens=2), sliding_window=window)


def test_softcap_and_learned_sinks(device):
    config = KVarNConfig(tile_size=64, sink_length=16, residual_length=8)
    state = make_state(config, device, torch.float16)
    query = make_query(state, heads=4, size=3.0)
    check(state, query, softcap=5.0)
    check(state, query, sinks=torch.randn(4, device=device).half() * 3)


def test_rows_are_mapped(device):
    config = KVarNConfig(tile_size=64, sink_length=16, residual_length=8)
    state = make_state(config, device, torch.float16).index_select(torch.tensor([1, 1, 0], device=device))
    assert state.tiles.rows is not None
    check(state, make_query(state, heads=4))


def test_strides(device):
    """Queries and dense tokens as attention modules hand them over: transposed views and slices of buffers."""
    config = KVarNConfig(tile_size=64, sink_length=16, residual_length=8)
    state = make_state(config, device, torch.float16)
    query = make_query(state, heads=4, tokens=3)
    want = by_kernel(state, query)
    assert torch.equal(by_kernel(state, query.transpose(1, 2).contiguous().transpose(1, 2)), want)
    assert torch.equal(by_kernel(state, query.transpose(2, 3).contiguous().transpose(2, 3)), want)


@pytest.mark.parametrize("slices", (1, 2, 3, 7, 40))
@pytest.mark.parametrize("pads", (None, (3, 90)))
def test_every_cut_gives_the_same(device, slices, pads):
    config = KVarNConfig(tile_size=64, sink_length=32, residual_length=64)
    state = make_state(config, device, torch.float16, pads=pads)
    mask = None
    if pads is not None:
        mask = torch.arange(state.length, device=device) >= torch.tensor(pads, device=device)[:, None, None, None]
    check(state, make_query(state, heads=4), mask, launch={"slices": slices})


@pytest.mark.parametrize("slices", (1, 2, 3))
@pytest.mark.parametrize("additive", (False, True))
def test_a_mask_for_all_heads_is_that_of_the_tile(device, slices, additive):
    """It is fetched one tile ahead."""
    config = KVarNConfig(tile_size=64, sink_length=32, residual_length=64)
    state = make_state(config, device, torch.float16, tiles=4)
    mask = torch.rand(2, 1, 1, state.length, generator=torch.Generator().manual_seed(3)) < 0.5
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, -4.0).half()
    check(state, make_query(state, heads=4), mask.to(device), launch={"slices": slices})


def test_slices_take_dense_tokens_or_tiles_where_that_comes_out_even():
    """16 blocks are as long as 7 tiles and a start: 3 slices of 14 tiles and 16 blocks have one result each."""
    from kvarn_kernels.schedule import plan

    assert plan(programs=1584, units=512, count=14, dense_length=256, block=16, weight=4) == (3, 3)
    assert plan(programs=1584, units=64, count=254, dense_length=256, block=16, weight=4) == (24, 25)


def spiky(state, where, factor):
    """The state with one token's (or channel's) scale multiplied, in keys and values alike."""
    for packed in (state.tiles.keys, state.tiles.values):
        scale = packed.token_scale if where == "token" else packed.channel_scale
        scale[..., 5] *= factor
    return state


@pytest.mark.parametrize("where", ("token", "channel"))
@pytest.mark.parametrize("factor", (30.0, 300.0, 1e-3))
def test_uneven_scales(device, where, factor):
    """Digits are relative to the largest entry that takes part, so an outlier elsewhere in the tile costs nothing."""
    config = KVarNConfig(tile_size=64, sink_length=16, residual_length=8)
    state = spiky(make_state(config, device, torch.float16), where, factor)
    check(state, make_query(state, heads=4))


def test_large_scores(device):
    config = KVarNConfig(tile_size=64, sink_length=16, residual_length=8)
    state = make_state(config, device, torch.float16)
    check(state, make_query(state, heads=4, size=100.0))


@pytest.mark.parametrize("part", ("keys", "values"))
def test_a_broken_token_is_seen(device, part):
    config = KVarNConfig(tile_size=64, sink_length=16, residual_length=8)
    state = make_state(config, device, torch.float16, tiles=2)
    getattr(state.tiles, part).token_scale[0, 0, 1, 3] = torch.nan
    out = by_kernel(state, make_query(state, heads=4))
    assert out[0, :, :2].isnan().all()
    assert out[0, :, 2:].isfinite().all() and out[1].isfinite().all()


def test_the_same_bits_every_time(device):
    state = make_state(KVarNConfig(tile_size=64, sink_length=16, residual_length=8), device, torch.float16)
    query = make_query(state, heads=4)
    assert torch.equal(by_kernel(state, query), by_kernel(state, query))


def test_what_is_refused():
    from kvarn_kernels.decode_attention import supported

    query = torch.empty(1, 4, 1, 64, dtype=torch.float16)
    assert supported(query, 64, 128, 4, 2)
    assert not supported(query.float(), 64, 128, 4, 2)
    assert not supported(query.expand(1, 4, 17, 64), 64, 128, 4, 2)
    assert not supported(torch.empty(1, 4, 1, 72, dtype=torch.float16), 64, 128, 4, 2)
    assert not supported(query, 512, 128, 4, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("bits", ((4, 2), (2, 2), (3, 2), (4, 4), (8, 4)))
@pytest.mark.parametrize(
    "heads, key_dim, value_dim", ((8, 128, 128), (16, 128, 128), (8, 64, 64), (8, 256, 256), (2, 192, 128))
)
def test_long_on_gpu(dtype, bits, heads, key_dim, value_dim):
    """Real lengths, the launch that is used there, and the launch options of every row of the table."""
    from kvarn_kernels.launch_table import TABLE

    device = torch.device("cuda")
    state = make_state(
        KVarNConfig(*bits), device, dtype, shape=(2, 2), tiles=40, extra=77, key_dim=key_dim, value_dim=value_dim
    )
    query = make_query(state, heads)
    got = check(state, query)
    assert torch.equal(got, by_kernel(state, query))
    for tuning in {tuning for _, tuning in TABLE}:
        check(state, query, launch={"tuning": tuning})
