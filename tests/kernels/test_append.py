"""The step of a static layer by kernels against the same step in plain torch."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import pytest
import torch

from kvarn_hf import ops
from kvarn_hf.config import KVarNConfig
from kvarn_hf.method import packing
from kvarn_hf.method.attention import attention
from kvarn_hf.ops import dispatch
from kvarn_hf.ops import steps as static
from kvarn_hf.state import storage as storages
from kvarn_hf.state.layer_state import LayerState
from kvarn_hf.state.tiles import PackedTiles
from tests.kernels import cases
from tests.kernels import test_decode_attention as exact

SMALL = KVarNConfig(tile_size=64, sink_length=8, residual_length=8)


class Layer:
    """Storage of one layer, stepped by kernels or by torch."""

    def __init__(self, config, keys, values, most, by_kernels):
        self.by_kernels = by_kernels
        with self.path():
            state = ops.commit(LayerState.empty(config, keys, values).appended(keys, values))
            padding = ops.left_padding(state)
            padded = padding is not None and bool((padding.length > 0).any())
            self.layout = storages.Layout.of(config, keys, values, most)._replace(padded=int(padded))
            self.storage = storages.allocate(self.layout, keys.device)
            storages.put(state, padding, self.storage, self.layout)
        self.progress = torch.tensor([[state.length, state.count, 0, 0]], device=keys.device)
        self.table = static.addresses(self.storage, self.layout)[None].to(keys.device)

    @contextmanager
    def path(self):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dispatch, "uses_kernels", lambda device: self.by_kernels)
            yield

    def begin(self):
        with self.path():
            static.advance(self.progress, self.layout.text)
            static.pack([self.storage], [0], self.table, self.progress, self.layout.text)

    def step(self, keys, values):
        self.begin()
        self.token = keys, values
        with self.path():
            static.write(self.storage, self.progress, 0, keys, values, self.layout.text)

    def attend(self, query, mask=None, token=None):
        with self.path():
            return static.attend(
                *(query, *(token or self.token), self.storage, self.progress, 0, mask, None),
                *(self.layout.text, query.shape[3] ** -0.5, 0.0),
            )

    def read(self, by_kernels=False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dispatch, "uses_kernels", lambda device: by_kernels)
            return static.read(self.storage, self.progress, 0, self.layout.text)

    @property
    def views(self):
        return storages.views(self.storage, self.layout)


def pair(
    config, device, dtype, length, steps, most=300, pads=None, shape=(2, 1), key_dim=32, value_dim=None, offset=0.0
):
    """Both layers with ``length`` tokens, and the ``steps`` that follow; keys have an ``offset``, in deviations."""
    total = length + steps
    keys = cases.tokens((*shape, total, key_dim), dtype, device)
    keys += offset * keys.std(2, keepdim=True)
    values = cases.tokens((*shape, total, value_dim or key_dim), dtype, device, 1, outlier_channel=3.0)
    for row, pad in enumerate(pads or ()):
        keys[row, :, :pad], values[row, :, :pad] = keys[row, :, :1], values[row, :, :1]
    layers = [Layer(config, keys[:, :, :length], values[:, :, :length], most, kernels) for kernels in (True, False)]
    after = [(keys[:, :, i : i + 1], values[:, :, i : i + 1]) for i in range(length, total)]
    return *layers, after


def assert_same(actual, expected):
    """Equal but for codes at rounding ties, and what follows from them."""
    assert torch.equal(actual.progress, expected.progress)
    length, count, _, _ = actual.progress[0].tolist()
    dense = length - count * actual.layout.tile_size
    got, want = actual.views, expected.views
    assert torch.equal(got["dense_keys"][:, :, :dense], want["dense_keys"][:, :, :dense])
    assert torch.equal(got["dense_values"][:, :, :dense], want["dense_values"][:, :, :dense])
    assert (got["prescale"] - want["prescale"]).abs().max() <= 2**-10 * want["prescale"].abs().max()
    config, tiles, other = actual.layout.config, *(PackedTiles.of(parts, count) for parts in (got, want))
    for mine, its, unpack, bits in (
        (tiles.keys, other.keys, packing.unpack_keys, config.key_bits),
        (tiles.values, other.values, packing.unpack_values, config.value_bits),
    ):
        codes, expected_codes = (unpack(x.codes[:, :, :count], bits).int() for x in (mine, its))
        assert ((codes - expected_codes).abs() <= 1).all()
        at_ties = (codes != expected_codes).float().mean((-2, -1))  # share of a tile's codes
        assert (at_ties < 0.01).all()
        for a, b in zip(mine[1:], its[1:], strict=True):
            a, b = a[:, :, :count].float(), b[:, :, :count].float()
            assert ((a - b).abs() <= 2e-3 * b.abs().amax(-1, keepdim=True) + 1e-7).all()
    for a, b in zip(actual.read(), expected.read(), strict=True):
        error = (a.float() - b.float()).norm() / b.float().norm()
        assert error < 5e-3


@pytest.mark.parametrize(
    ("bits", "method"), [((4, 2), "kvarn"), ((2, 2), "published"), ((3, 4), "hadamard"), ((8, 4), "rtn")]
)
def test_steps_past_a_flush(device, bits, method):
    config = KVarNConfig(*bits, tile_size=64, sink_length=8, residual_length=8, method=method)
    by_kernel, by_torch, steps = pair(config, device, torch.float32, 8 + 64 + 64 + 8 - 2, 5)
    for i, step in enumerate(steps):
        by_kernel.step(*step)
        by_torch.step(*step)
        assert_same(by_kernel, by_torch)
        assert by_kernel.progress[0, 2] == (i == 2)
    assert by_kernel.progress[0, 1] == 2


def test_layers_are_packed_together(device):
    """One that is due, one that is not, and one that belongs to others."""
    due, _, steps = pair(SMALL, device, torch.float32, 143, 2)
    alone, _, _ = pair(SMALL, device, torch.float32, 143, 2)
    waiting, _, _ = pair(SMALL, device, torch.float32, 100, 2)
    progress = torch.cat([waiting.progress, due.progress, due.progress])
    table = torch.cat([waiting.table, torch.zeros_like(due.table), due.table])
    kept = waiting.storage.clone()
    text = due.layout.text
    for step in steps:
        with due.path():
            static.advance(progress, text)
            static.pack([waiting.storage, due.storage], [0, 2], table, progress, text)
            for layer, row in ((waiting, 0), (due, 2)):
                static.write(layer.storage, progress, row, *step, text)
        alone.step(*step)
    assert torch.equal(due.storage, alone.storage)
    assert progress.tolist() == [[102, 1, 0, 0], *[[145, 2, 1, 0]] * 2]
    assert torch.equal(waiting.views["keys.codes"], storages.views(kept, waiting.layout)["keys.codes"])


@pytest.mark.parametrize("residual", [0, 8, 100])
@pytest.mark.parametrize("sink", [0, 70])
@pytest.mark.parametrize("offset", [0.0, 0.85, 2.0])  # in deviations: damping from 2 on, from 3.7, from 8
def test_the_first_tile_sets_the_prescale(device, sink, residual, offset):
    config = KVarNConfig(tile_size=64, sink_length=sink, residual_length=residual)
    by_kernel, by_torch, steps = pair(config, device, torch.float32, sink + 64 + residual - 1, 3, offset=offset)
    for step in steps:
        by_kernel.step(*step)
        by_torch.step(*step)
        assert_same(by_kernel, by_torch)
    assert by_kernel.progress[0, 1] == 1
    assert (by_kernel.views["prescale"] != 1).any()


@pytest.mark.parametrize(("packed", "pads"), [(0, (30, 0)), (0, (40, 3)), (1, (5, 75)), (1, (60, 70)), (2, (100, 137))])
def test_left_padding(device, packed, pads):
    """Sinks that lie in the tile, behind it, and in both; a row of which nothing is packed yet."""
    by_kernel, by_torch, steps = pair(SMALL, device, torch.float32, 8 + (packed + 1) * 64 + 8 - 1, 3, pads=pads)
    for step in steps:
        by_kernel.step(*step)
        by_torch.step(*step)
        assert_same(by_kernel, by_torch)
    assert by_kernel.progress[0, 1] == packed + 1


def test_head_dims_that_differ(device):
    by_kernel, by_torch, steps = pair(SMALL, device, torch.float32, 79, 3, key_dim=48, value_dim=16, shape=(1, 1))
    for step in steps:
        by_kernel.step(*step)
        by_torch.step(*step)
        assert_same(by_kernel, by_torch)


def test_no_room(device):
    by_kernel, by_torch, steps = pair(SMALL, device, torch.float16, 150, 3, most=152)
    for step in steps[:2]:
        by_kernel.step(*step)
        by_torch.step(*step)
    before = by_kernel.storage.clone(), by_kernel.progress.clone()
    query = torch.randn(2, 4, 1, 32, device=device).half()
    assert by_kernel.attend(query).isfinite().all()
    for layer in (by_kernel, by_torch):
        layer.step(*steps[2])
        assert layer.attend(query).isnan().all()
        assert layer.progress[0].tolist() == [152, 2, 0, 1]
    assert torch.equal(before[0], by_kernel.storage)


@pytest.mark.parametrize("length", [40, 170])
def test_dense_tensors_end_where_the_tokens_do(device, length):
    by_kernel, _, (step,) = pair(SMALL, device, torch.float32, length, 1, pads=(30, 0))
    by_kernel.step(*step)
    for got, want in zip(by_kernel.read(by_kernels=True), by_kernel.read(), strict=True):
        assert got.shape[2] == 300
        assert not got[:, :, length + 1 :].any()
        assert (got - want).norm() < 1e-3 * want.norm()


@pytest.mark.parametrize("pads", [None, (30, 0)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [40, 79, 170])
def test_attention_up_to_the_true_length(device, pads, masked, length):
    layer, _, steps = pair(SMALL, device, torch.float16, length, 2, pads=pads)
    generator = torch.Generator().manual_seed(0)
    mask = None
    if masked:
        mask = (torch.rand(2, 1, 1, 300, generator=generator) < 0.7).to(device)
    query = torch.randn(2, 6, 1, 32, generator=generator).to(device).half()
    options = {"scaling": 32**-0.5, "causal": False}
    for step in steps:
        layer.step(*step)
        got = layer.attend(query, mask)
        assert got.shape == (2, 1, 6, 32)
        length, count, _, _ = layer.progress[0].tolist()
        state = storages.state_of(layer.storage, layer.layout, length, count)
        shown = None if mask is None else mask[..., :length]
        expected = attention(query, *exact.dequantized(state), shown, **options)
        rounded = attention(query, *(x.half() for x in exact.dequantized(state)), shown, **options)
        allowed = 2 * (rounded - expected).norm() + 2**-10 * expected.norm()
        assert (got - expected).norm() <= allowed


@pytest.mark.parametrize(("length", "groups", "pads"), [(40, 1, None), (79, 6, (30, 0)), (170, 12, None)])
def test_attention_writes_the_token(device, length, groups, pads):
    """The same bits as when it was written before, also where several programs write it, or there is no room."""
    layer, _, steps = pair(SMALL, device, torch.float16, length, 2, most=length + 1, pads=pads, shape=(2, 2))
    other = Layer.__new__(Layer)
    vars(other).update(vars(layer))
    other.storage, other.progress = layer.storage.clone(), layer.progress.clone()
    other.table = static.addresses(other.storage, other.layout)[None].to(device)
    query = torch.randn(2, 2 * groups, 1, 32, generator=torch.Generator().manual_seed(0)).to(device).half()
    for i, (keys, values) in enumerate(steps):
        layer.step(keys, values)
        expected = layer.attend(query)
        other.begin()
        got = other.attend(query, token=(keys.mT.contiguous().mT, values))
        assert torch.equal(other.storage, layer.storage)
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())
        assert bool(got.isnan().all()) == bool(i)


@pytest.mark.parametrize("kind", ["none", "bool", "per head", "additive"])
@pytest.mark.parametrize("length", [40, 170])
def test_attention_in_float32_reads_dense_tensors(device, length, kind):
    """No fused kernel takes float32, and only the device knows where the tokens end."""
    layer, _, (step,) = pair(SMALL, device, torch.float32, length, 1)
    layer.step(*step)
    generator = torch.Generator().manual_seed(0)
    heads = 6 if kind in ("per head", "additive") else 1
    mask = (torch.rand(1, heads, 1, 300, generator=generator) < 0.7).to(device)
    if kind == "additive":
        mask = torch.zeros(mask.shape, device=device).masked_fill(~mask, -1.0)
    query = torch.randn(2, 6, 1, 32, generator=generator).to(device)
    got = layer.attend(query, None if kind == "none" else mask)
    length, count, _, _ = layer.progress[0].tolist()
    state = storages.state_of(layer.storage, layer.layout, length, count)
    shown = None if kind == "none" else mask[..., :length]
    expected = attention(query, *ops.dense(state), shown, scaling=32**-0.5, causal=False)
    assert (got - expected).norm() <= 1e-5 * expected.norm()


def test_tokens_that_are_not_finite(device):
    config = KVarNConfig(tile_size=64, sink_length=8, residual_length=8)
    by_kernel, by_torch, steps = pair(config, device, torch.float32, 8 + 64 + 8 - 1, 3)
    for layer in (by_kernel, by_torch):
        layer.views["dense_keys"][0, 0, 20, 3] = torch.nan
        layer.views["dense_values"][1, 0, 30, 5] = torch.inf
        for step in steps:
            layer.step(*step)
    assert by_kernel.progress[0, 1] == 1
    got, want = by_kernel.views["prescale"], by_torch.views["prescale"]
    assert (got - want).abs().max() <= 2**-10 * want.max()
    for got, want in zip(by_kernel.read(), by_torch.read(), strict=True):
        assert torch.equal(got.isfinite(), want.isfinite())
        assert torch.allclose(got.nan_to_num(0, 0, 0), want.nan_to_num(0, 0, 0), atol=1e-2)


def test_only_a_tile_that_is_due_waits_for_the_kernel():
    from kvarn_kernels.append import may_skip_pack, pack_kernel
    from kvarn_kernels.launch import begin, finish

    idle = torch.tensor([[200, 2, 0, 0], [100, 1, 0, 1]])
    due = torch.tensor([[200, 2, 0, 0], [100, 1, 1, 0]])
    finish(pack_kernel)
    assert not may_skip_pack(idle)
    release = threading.Event()
    begin(pack_kernel, release.wait)
    try:
        assert may_skip_pack(idle)
        assert not may_skip_pack(due)
    finally:
        release.set()
    finish(pack_kernel)
    assert not may_skip_pack(idle)
