"""The settings: presets, closed forms, and one clear sentence for every bad field."""

import doctest
import importlib
import re
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvarn_hf
from kvarn_hf import KVarNConfig
from kvarn_hf.config import BIT_WIDTHS, METHODS, PRESETS, TILE_SIZES
from kvarn_hf.method.quantize import quantize_keys, quantize_values
from kvarn_hf.state.tiles import PackedTiles

HEAD_DIMS = (8, 16, 24, 64, 80, 96, 112, 128, 192, 256, 512)

configs = st.builds(
    KVarNConfig,
    key_bits=st.sampled_from(BIT_WIDTHS),
    value_bits=st.sampled_from(BIT_WIDTHS),
    tile_size=st.sampled_from(TILE_SIZES),
    sink_length=st.integers(0, 4096),
    residual_length=st.integers(0, 4096),
    method=st.sampled_from(METHODS),
    iterations=st.none() | st.integers(0, 64),
    check_finite=st.booleans(),
)


def test_default_is_the_recommended_preset():
    assert KVarNConfig() == KVarNConfig.from_preset("kvarn_k4v2_g128")
    config = KVarNConfig()
    assert (config.sink_length, config.residual_length, config.method, config.iterations) == (128, 128, "kvarn", 2)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_parse_and_name_themselves(name):
    config = KVarNConfig.from_preset(name)
    assert config.name == name
    assert name == f"kvarn_k{config.key_bits}v{config.value_bits}_g{config.tile_size}"


def test_recommended_presets_cover_both_tile_sizes():
    bits = {"k4v2", "k2v2", "k4v4", "k3v2", "k8v4"}
    assert set(PRESETS) == {f"kvarn_{b}_g{g}" for b in bits for g in TILE_SIZES}


def test_preset_overrides():
    config = KVarNConfig.from_preset("kvarn_k2v2_g64", sink_length=4, value_bits=8)
    assert (config.key_bits, config.value_bits, config.tile_size, config.sink_length) == (2, 8, 64, 4)


@pytest.mark.parametrize(
    "name",
    ["", "kvarn", "k4v2_g128", "kvarn_k5v2_g128", "kvarn_k4v2_g32", "kvarn_k4v2_g128 ", "KVARN_K4V2_G128", None, 4],
)
def test_unknown_preset_names_itself_and_what_is_allowed(name):
    with pytest.raises(ValueError, match="preset must be one of") as error:
        KVarNConfig.from_preset(name)
    assert repr(name) in str(error.value)
    assert "kvarn_k4v2_g128" in str(error.value)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        *(("key_bits", value, "2, 3, 4, 8") for value in (0, 1, 5, 16, -4, 4.0, "4", None, True)),
        *(("value_bits", value, "2, 3, 4, 8") for value in (0, 1, 6, 2.0, "2", None, [2])),
        *(("tile_size", value, "64, 128") for value in (0, 32, 127, 256, 128.0, "128", None)),
        *(("sink_length", value, ">= 0") for value in (-1, 1.5, "4", None, True)),
        *(("residual_length", value, ">= 0") for value in (-128, 0.0, "128", None, False)),
        *(("method", value, "kvarn, published, hadamard, rtn") for value in ("", "KVARN", "kivi", None, 2)),
        *(("iterations", value, "from 0 to 64") for value in (-1, 65, 2.0, "2", True)),
        *(("check_finite", value, "True or False") for value in (0, 1, None, "yes")),
    ],
)
def test_bad_field_names_itself_its_value_and_what_is_allowed(field, value, allowed):
    for build in (lambda **kw: KVarNConfig(**kw), KVarNConfig().replace):
        with pytest.raises(ValueError) as error:
            build(**{field: value})
        message = str(error.value)
        assert message.startswith(field)
        assert repr(value) in message
        assert allowed in message
        assert "\n" not in message


def test_frozen():
    config = KVarNConfig()
    for field in fields(config):
        with pytest.raises(FrozenInstanceError):
            setattr(config, field.name, getattr(config, field.name))
    assert hash(config) == hash(KVarNConfig())


def test_iterations_default_to_the_methods_own():
    assert [KVarNConfig(method=m).iterations for m in METHODS] == [2, 8, 0, 0]
    assert KVarNConfig(method="published", iterations=16).replace(method="kvarn").iterations == 2
    assert KVarNConfig().replace(method="published", iterations=3).iterations == 3
    assert KVarNConfig(iterations=5).replace(key_bits=2).iterations == 5


@settings(derandomize=True, deadline=None)
@given(configs)
def test_round_trip_through_plain_values(config):
    values = config.to_dict()
    assert KVarNConfig(**values) == config
    assert all(type(v) in (int, str, bool) for v in values.values())
    if config.method == "kvarn":
        assert KVarNConfig.from_preset(config.name).key_tile_bytes(64) == config.key_tile_bytes(64)


@settings(derandomize=True, deadline=None)
@given(configs, st.integers(0, 20_000))
def test_packed_tiles_leave_sink_and_tail_dense(config, length):
    count = config.packed_tiles(length)
    tail = length - config.sink_length - count * config.tile_size
    assert count >= 0
    if count:
        assert config.residual_length <= tail < config.residual_length + config.tile_size
    else:
        assert tail < config.residual_length + config.tile_size
    assert config.packed_tiles(length + config.tile_size) <= count + 1


@pytest.mark.parametrize("tile_size", TILE_SIZES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_closed_forms_are_the_bytes_of_packed_tensors(head_dim, tile_size):
    x = torch.randn(1, tile_size, head_dim, generator=torch.Generator().manual_seed(head_dim))
    for bits in BIT_WIDTHS:
        config = KVarNConfig(key_bits=bits, value_bits=bits, tile_size=tile_size)
        key_bytes = sum(t.nbytes for t in quantize_keys(x, None, config))
        value_bytes = sum(t.nbytes for t in quantize_values(x, config))
        assert config.key_tile_bytes(head_dim) == key_bytes
        assert config.value_tile_bytes(head_dim) == value_bytes
        elements = tile_size * head_dim
        assert config.bits_per_element(head_dim) == pytest.approx(8 * (key_bytes + value_bytes) / (2 * elements))


def test_closed_forms_are_the_bytes_of_the_arenas():
    config = KVarNConfig(key_bits=3, value_bits=2, tile_size=64)
    tiles = PackedTiles.allocate(2, 3, 192, 128, config, 5, torch.device("cpu"))
    held = 2 * 3 * tiles.capacity * (config.key_tile_bytes(192) + config.value_tile_bytes(128))
    assert sum(t.nbytes for t in tiles.parts.values()) == held


def test_bits_per_element_by_hand():
    # 4-bit keys: 4 + 16 (2 / 128 + 1 / 128); 2-bit values: 2 + 16 (1 / 128 + 2 / 128); their mean.
    assert KVarNConfig().bits_per_element(128) == 3.375
    assert KVarNConfig.from_preset("kvarn_k2v2_g128").bits_per_element(128) == 2.375
    # Keys and values of different head_dim are weighted by their elements.
    key, value = 4 + 16 * (2 / 128 + 1 / 192), 2 + 16 * (1 / 128 + 2 / 128)
    assert KVarNConfig().bits_per_element(192, 128) == pytest.approx((192 * key + 128 * value) / 320)


def _modules_with_examples():
    root = Path(kvarn_hf.__file__).parent
    for path in sorted(root.rglob("*.py")):
        if re.search(r"^ *>>> ", path.read_text(encoding="utf-8"), re.MULTILINE):
            yield ".".join(("kvarn_hf", *path.relative_to(root).with_suffix("").parts))


@pytest.mark.parametrize("name", list(_modules_with_examples()))
def test_examples_in_docstrings(name):
    assert doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE).failed == 0
