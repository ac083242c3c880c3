"""Random sequences of everything that can be done to a cache, against a plain-tensor model of sinks, tiles and tail."""

import copy
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvarn_hf import KVarNCache, KVarNConfig
from kvarn_hf.method import quantize as reference
from kvarn_hf.ops import dispatch
from kvarn_hf.state.tiles import capacity_for
from tests.cache.layer_model import RESIDUAL, SINK, TILE, LayerModel
from tests.storage import held_bytes, held_storages

SHAPES = ((2, 16, 24), (1, 24, 16))  # per layer: heads, head_dim of keys, head_dim of values
MOST_ROWS = 4

UPDATES = {
    "count": st.integers(1, 300) | st.integers(1, 4),
    "batch": st.integers(1, 3),
    "leads": st.lists(st.just(0) | st.integers(0, 300), min_size=MOST_ROWS, max_size=MOST_ROWS),
    "seed": st.integers(0, 2**20),
}


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        **UPDATES,
        method=st.sampled_from(["kvarn", "kvarn", "kvarn", "published", "hadamard", "rtn"]),
        bits=st.tuples(*[st.sampled_from([2, 3, 4, 8])] * 2),
        residual=st.sampled_from([RESIDUAL, RESIDUAL, 0, 80]),
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        outlier=st.booleans(),
    )
    def begin(self, method, bits, residual, dtype, outlier, **first):
        self.config = KVarNConfig(*bits, TILE, SINK, residual, method)
        self.dtype, self.outlier = dtype, outlier
        self.cache = KVarNCache(kvarn=self.config)
        self.models = None
        self.others = []  # copies that were left behind, with what they must go on holding
        self.expected_calls = 0
        self.calls = 0
        self.pure = True  # nothing but appending so far
        self.folder = tempfile.TemporaryDirectory()
        real = reference.quantize_keys, reference.quantize_values

        def counted(function, name):
            def call(x, *args):
                self.calls += x.shape[0] * x.shape[2] if x.ndim == 5 else pytest.fail(f"{name} of {x.shape}")
                return function(x, *args)

            return mock.patch.object(reference, name, call)

        self.patches = [counted(real[0], "quantize_keys"), counted(real[1], "quantize_values")]
        for patch in self.patches:
            patch.start()
        self.update(**first)

    def tokens(self, batch, count, leads, seed):
        """Per layer, new keys and values; row i begins with ``leads[i]`` tokens like the row's first."""
        generator = torch.Generator().manual_seed(seed)
        for index, (heads, *dims) in enumerate(SHAPES):
            pair = []
            for side, dim in enumerate(dims):
                x = torch.randn(batch, heads, count, dim, generator=generator)
                if self.outlier:
                    x[..., 3] *= 40
                x = x.to(self.dtype)
                for row, lead in enumerate(leads[:batch]):
                    model = self.models and self.models[index]
                    held = x if not model or not model.length else (model.keys, model.values)[side]
                    x[row, :, :lead] = held[row, :, :1].clone()
                pair.append(x)
            yield pair

    def apply(self, change):
        for model in self.models:
            change(model)

    # --- what can happen ---

    @rule(**UPDATES)
    def update_again(self, **new):
        """Twice as likely as anything else."""
        self.update(**new)

    @rule(**UPDATES)
    def update(self, count, batch, leads, seed):
        batch = self.models[0].batch if self.models else batch
        new = list(self.tokens(batch, count, leads, seed))
        if self.models is None:
            self.models = [LayerModel(self.config, *pair) for pair in new]
        for index, (model, (keys, values)) in enumerate(zip(self.models, new, strict=True)):
            given_keys, given_values = keys.clone(), values.clone()
            read = self.cache.update(keys, values, index)
            model.append(given_keys, given_values)
            # Attention reads what was packed before this step dequantized, and everything else exactly.
            assert all(torch.equal(a, b) for a, b in zip(read, model.read(), strict=True))
            self.expected_calls += 2 * model.due() * model.batch
            model.commit()
            keys.fill_(torch.nan)  # nothing of the caller's memory is kept
            values.fill_(torch.nan)

    @rule(failing=st.integers(0, len(SHAPES) - 1), **UPDATES)
    def failed_update(self, failing, count, batch, leads, seed):
        """Out of memory in one of the layers: every layer still holds what it held."""
        due = self.models[0].due(count)
        if not due:
            return
        real, done = dispatch.quantize, []

        def quantize(*args):
            if len(done) == failing:
                raise MemoryError
            done.append(1)
            real(*args)

        with mock.patch.object(dispatch, "quantize", quantize), pytest.raises(MemoryError):
            for index, pair in enumerate(self.tokens(self.models[0].batch, count, leads, seed)):
                self.cache.update(*pair, index)
        self.expected_calls += 2 * due * self.models[0].batch * failing
        self.pure = False  # room that was made for the tiles stays

    @rule(how=st.sampled_from(["tail", "tail", "any", "tile", "sink", "keep"]), amount=st.integers(0, 1200))
    def crop(self, how, amount):
        model = self.models[0]
        kept = {
            "tail": model.length - amount % (self.config.residual_length + 1),
            "any": amount % (model.length + 1),
            "tile": SINK + amount % (len(model.tiles) + 1) * TILE,
            "sink": amount % (SINK + 1),
            "keep": max(1, amount),
        }[how]
        note(f"from {model.length} to {kept}")
        argument = kept if how == "keep" else min(0, kept - model.length)
        before = [copy.copy(m) for m in self.models]
        possible = [m.crop(max(0, kept)) for m in self.models]
        if all(possible):
            self.cache.crop(argument)
            self.pure = self.pure and model.length == before[0].length
        else:
            self.models = before
            with pytest.raises(ValueError, match=f"crop to {kept} tokens would cut through a packed tile"):
                self.cache.crop(argument)

    @rule(indices=st.lists(st.integers(0, 11), min_size=MOST_ROWS, max_size=MOST_ROWS))
    def reorder(self, indices):
        batch = self.models[0].batch
        rows = [i % batch for i in indices[:batch]]
        self.cache.reorder_cache(torch.tensor(rows))
        self.apply(lambda model: model.select(rows))
        self.pure = False

    @rule(repeats=st.integers(1, 4))
    def repeat(self, repeats):
        repeats = min(repeats, MOST_ROWS // self.models[0].batch)
        self.cache.batch_repeat_interleave(repeats)
        rows = [i for i in range(self.models[0].batch) for _ in range(repeats)]
        self.apply(lambda model: model.select(rows))
        self.pure = False

    @rule(indices=st.lists(st.integers(0, 11), min_size=1, max_size=MOST_ROWS), kind=st.sampled_from("tlum"))
    def select(self, indices, kind):
        batch = self.models[0].batch
        rows = [i % batch for i in indices]
        if kind == "m":
            rows = sorted(set(rows))
            given_rows = torch.tensor([i in rows for i in range(batch)])
        else:
            given_rows = {"t": torch.tensor, "l": list, "u": tuple}[kind](rows)
        self.cache.batch_select_indices(given_rows)
        self.apply(lambda model: model.select(rows))
        self.pure = False
        for layer in self.cache.layers:  # and only their memory
            assert layer.state.tiles.keys.codes.shape[0] == len(rows)

    @rule(**UPDATES)
    def reset(self, **new):
        self.cache.reset()
        self.models, self.pure = None, True
        assert self.cache.get_seq_length() == 0
        assert self.cache.memory_footprint() == 0
        self.update(**new)

    @rule(keep_copy=st.booleans())
    def deepcopy(self, keep_copy):
        copied = copy.deepcopy(self.cache)
        assert copied.memory_footprint() == self.cache.memory_footprint()
        assert not held_storages(copied.layers).keys() & held_storages(self.cache.layers).keys()
        left, self.cache = (copied, self.cache) if keep_copy else (self.cache, copied)
        self.others = [*self.others[-1:], (left, [model.read() for model in self.models])]

    @rule()
    def save_and_load(self):
        path = Path(self.folder.name) / "cache.safetensors"
        self.cache.save(path)
        self.cache = KVarNCache.load(path)
        path.unlink()
        assert self.cache.kvarn == self.config

    # --- what is always so ---

    @invariant()
    def holds_the_same_tokens(self):
        for index, model in enumerate(self.models):
            layer = self.cache.layers[index]
            for held, expected in zip((layer.keys, layer.values), model.read(), strict=True):
                assert held.dtype == self.dtype
                assert held.shape == expected.shape
                assert torch.equal(held, expected)

    @invariant()
    def knows_its_length(self):
        length = self.models[0].length
        assert self.cache.get_seq_length() == length
        for index in range(len(self.cache.layers)):
            assert self.cache.get_seq_length(index) == length
            assert self.cache.get_mask_sizes(3, index) == (length + 3, 0)

    @invariant()
    def keeps_the_three_regions(self):
        report, count = self.cache.report(), len(self.models[0].tiles)
        assert report["tokens"] == report["sink_tokens"] + report["packed_tokens"] + report["tail_tokens"]
        assert (report["tokens"], report["tiles"]) == (self.models[0].length, count)
        assert report["packed_tokens"] == count * TILE
        if self.pure:
            assert count == self.config.packed_tiles(self.models[0].length)

    @invariant()
    def never_quantizes_again(self):
        assert self.calls == self.expected_calls

    @invariant()
    def reports_the_bytes_it_holds(self):
        assert self.cache.memory_footprint() == sum(map(held_bytes, self.cache.layers))
        for index, model in enumerate(self.models):
            self.check_bytes(self.cache.layers[index], model, *SHAPES[index])

    def check_bytes(self, layer, model, heads, key_dim, value_dim):
        tiles = layer.state.tiles
        per_tile = self.config.key_tile_bytes(key_dim) + self.config.value_tile_bytes(value_dim)
        arena = sum(t.untyped_storage().nbytes() for t in (*tiles.keys, *tiles.values))
        assert arena == tiles.keys.codes.shape[0] * heads * tiles.capacity * per_tile
        assert tiles.capacity >= len(model.tiles)
        if not self.pure:
            return
        # Appended to only: every byte follows from the number of tokens.
        batch, item = model.batch, self.dtype.itemsize
        count = self.config.packed_tiles(model.length)
        dense = -(-(model.length - count * TILE) // 32) * 32
        expected = batch * heads * (capacity_for(count) * per_tile + dense * (key_dim + value_dim) * item)
        if count and self.config.method == "kvarn":
            expected += 2 * batch * heads * key_dim
        if count and batch > 1:
            expected += 8 * batch + batch * heads * (key_dim + value_dim) * item
        assert layer.memory_footprint() == expected

    def teardown(self):
        if not hasattr(self, "patches"):
            return
        for patch in self.patches:
            patch.stop()
        self.folder.cleanup()
        for cache, reads in self.others:
            for layer, (keys, values) in zip(cache.layers, reads, strict=True):
                assert torch.equal(layer.keys, keys)
                assert torch.equal(layer.values, values)


TestCache = CacheMachine.TestCase
TestCache.settings = settings(
    max_examples=40,
    stateful_step_count=14,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    cuts=st.lists(st.integers(1, 499), max_size=12),
    pads=st.lists(st.just(0) | st.integers(0, 400), min_size=1, max_size=3),
    residual=st.sampled_from([0, RESIDUAL, 128]),
    method=st.sampled_from(["kvarn", "published"]),
    seed=st.integers(0, 2**16),
)
def test_state_is_a_function_of_the_tokens(cuts, pads, residual, method, seed):
    """One prefill, chunks or single tokens: the same codes, scales and bytes."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(len(pads), 2, 500, dim, generator=generator) for dim in (16, 24))
    keys[..., 5] *= 50
    for row, pad in enumerate(pads):
        for x in (keys, values):
            x[row, :, :pad] = x[row, :, :1].clone()
    config = KVarNConfig(tile_size=TILE, sink_length=SINK, residual_length=residual, method=method)

    def fed(bounds):
        cache = KVarNCache(kvarn=config)
        for begin, end in zip([0, *bounds], [*bounds, 500], strict=True):
            cache.update(keys[:, :, begin:end], values[:, :, begin:end], 0)
        return cache.layers[0]

    whole = fed([])
    for part in (fed(sorted(set(cuts))), fed(range(1, 500))):
        assert torch.equal(part.keys, whole.keys)
        assert torch.equal(part.values, whole.values)
        assert part.memory_footprint() == whole.memory_footprint()
        if method == "kvarn":
            assert torch.equal(part.state.prescale, whole.state.prescale)
        if max(pads) < 2 or len(pads) == 1:  # tiles of nothing but padding are never read
            for ours, theirs in zip(part.state.tiles.filled(), whole.state.tiles.filled(), strict=True):
                assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# Tokens like the first at the start, and as many again behind the cut.
PADDING = [(200, 0), (200, 100), (190, 0), (190, 20), (100, 0), (100, 20), (2, 0), (0, 0)]


@pytest.mark.parametrize("kept", [1, 10, SINK, SINK + TILE, SINK + 2 * TILE, 170, 199])
@pytest.mark.parametrize(("run", "more"), PADDING)
def test_crop_inside_padding_and_go_on(run, more, kept):
    """A run that was cut short ends where it was cut, or goes on there."""
    config = KVarNConfig(tile_size=TILE, sink_length=SINK, residual_length=RESIDUAL)
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 2, 600, dim, generator=generator) for dim in (16, 24))
    keys[..., 5] *= 50
    for x in (keys, values):
        x[1, :, :run] = x[1, :, :1].clone()
        x[1, :, 200 : 200 + more] = x[1, :, :1].clone()
    cache, model = KVarNCache(kvarn=config), LayerModel(config, keys, values)

    def update(new):
        cache.update(keys[:, :, new], values[:, :, new], 0)
        model.append(keys[:, :, new], values[:, :, new])
        model.commit()

    update(slice(0, 200))
    cache.crop(kept - 200)
    assert model.crop(kept)
    for new in (slice(200, 230), slice(230, 600)):
        update(new)
        assert torch.equal(cache.layers[0].keys, model.read()[0])
        assert torch.equal(cache.layers[0].values, model.read()[1])
