"""What quantizing and dequantizing one layer costs, after checking what the kernels compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console

from kvarn_hf import ops
from kvarn_hf.bench.inputs import in_float, packed_state, random_tokens, relative_error, stored_bytes
from kvarn_hf.bench.results import measured_with
from kvarn_hf.bench.timing import cold_inputs, copy_bandwidth, milliseconds
from kvarn_hf.config import KVarNConfig
from kvarn_hf.layers.growing import KVarNLayer
from kvarn_hf.method import packing
from kvarn_hf.method import quantize as reference
from kvarn_hf.state.tiles import PackedTiles
from kvarn_hf.terminal import table

_LAYERS = 36
_CHECKED_TOKENS = 8192
_CLOSE = 4e-3  # relative error of a rounding to bfloat16


def quantize(
    tokens: int = 32768, heads: int = 8, head_dim: int = 128, preset: str = "kvarn_k4v2_g128"
) -> dict[str, Any]:
    """Print a table of times, bandwidths and peak memory of one layer's quantization, and return its figures.

    Parameters
    ----------
    tokens, heads, head_dim : int
        The layer: ``[1, heads, tokens, head_dim]`` keys and values in bfloat16. ``tokens`` is cut to whole tiles.
    preset : str
        Bits and tile size, see :data:`kvarn_hf.config.PRESETS`.

    Returns
    -------
    dict
        ``quantize_ms`` (keys and values of the layer), ``flush_ms`` (one tile of every one of 36 layers),
        ``dequantize_ms``, ``dequantize_gb_per_s``, ``copy_gb_per_s``, ``dequantize_share`` (of the copy bandwidth),
        ``differing_codes`` (share, against the torch path on the same inputs), ``prefill_peak_bytes`` (on top of the
        inputs), ``dense_bytes``, and what it was measured with.

    Raises
    ------
    ValueError
        If there are too few tokens for a tile to be packed.
    RuntimeError
        If there is no GPU that the kernels run on, or they compute something other than the torch path.
    """
    if not torch.cuda.is_available() or not ops.uses_kernels(torch.device("cuda", torch.cuda.current_device())):
        raise RuntimeError("the quantization benchmark needs a GPU that the Triton kernels run on")
    config = KVarNConfig.from_preset(preset)
    tokens -= tokens % config.tile_size
    keys, values = random_tokens(1, heads, tokens, head_dim)
    figures = {
        **measured_with(),
        "differing_codes": _differing_codes(keys[:, :, :_CHECKED_TOKENS], values[:, :, :_CHECKED_TOKENS], config),
        "quantize_ms": _quantize_milliseconds(heads, tokens, head_dim, config),
        "flush_ms": _quantize_milliseconds(heads, config.tile_size, head_dim, config, layers=_LAYERS),
        **_dequantizing(keys, values, config),
        **_prefill_memory(keys, values, config),
    }
    _show(figures, keys.shape, config)
    return figures


def _quantize_milliseconds(heads: int, tokens: int, head_dim: int, config: KVarNConfig, layers: int = 1) -> float:
    """Of quantizing so many tokens in each of some layers."""

    def make(seed: int) -> Callable[[], list[PackedTiles]]:
        inputs = [random_tokens(1, heads, tokens, head_dim, seed * layers + layer) for layer in range(layers)]
        calls = [_quantizing(keys, values, config) for keys, values in inputs]
        return lambda: [call() for call in calls]

    return milliseconds(cold_inputs(make, layers * 4 * heads * tokens * head_dim))


def _quantizing(keys: torch.Tensor, values: torch.Tensor, config: KVarNConfig) -> Callable[[], PackedTiles]:
    """A call that quantizes these tokens into arenas that are there already."""
    batch, heads, length, key_dim = keys.shape
    count = length // config.tile_size
    tiles = PackedTiles.allocate(batch, heads, key_dim, values.shape[3], config, count, keys.device)
    prescale = ops.key_prescale(keys[:, :, : config.tile_size])

    def call() -> PackedTiles:
        ops.quantize(keys, values, prescale, tiles, config, config.sink_length, None)
        return tiles.truncated(count)

    return call


def _differing_codes(keys: torch.Tensor, values: torch.Tensor, config: KVarNConfig) -> float:
    """Share of codes that differ from the torch path's; any that differ by more than one are an error."""
    actual = _quantizing(keys, values, config)().filled()
    prescale = ops.key_prescale(keys[:, :, : config.tile_size]).unsqueeze(2)
    key_tiles, value_tiles = (x.unflatten(2, (-1, config.tile_size)) for x in (keys, values))
    expected = (reference.quantize_keys(key_tiles, prescale, config), reference.quantize_values(value_tiles, config))
    unpacks = (packing.unpack_keys, config.key_bits), (packing.unpack_values, config.value_bits)
    sides = zip(actual, expected, unpacks, strict=True)
    codes = [(unpack(got.codes, bits).short(), unpack(want.codes, bits).short()) for got, want, (unpack, bits) in sides]
    difference = torch.cat([(got - want).abs().flatten() for got, want in codes])
    share = (difference > 0).double().mean().item()
    if difference.max() > 1 or share > 1e-3:
        raise RuntimeError(
            f"the kernel's codes are not the torch path's: {share:.1e} of them differ, by up to {difference.max()}"
        )
    return share


def _dequantizing(keys: torch.Tensor, values: torch.Tensor, config: KVarNConfig) -> dict[str, float]:
    state = packed_state(keys, values, config)
    sink, tail = config.sink_length, state.tail_start
    sides = zip(("keys", "values"), in_float(state), ops.dense(state), (keys, values), strict=True)
    for name, want, got, given in sides:
        if not all(torch.equal(got[:, :, part], given[:, :, part]) for part in (slice(sink), slice(tail, None))):
            raise RuntimeError(f"the dense {name} came back changed")
        difference = relative_error(got[:, :, sink:tail], want[:, :, sink:tail])
        if not difference < _CLOSE:
            raise RuntimeError(f"the dequantized {name} are not the torch path's: relative difference {difference:.1e}")
    taken = milliseconds([lambda: ops.dense(state)])
    rate = (stored_bytes(state) + keys.nbytes + values.nbytes) / taken / 1e6
    copy = copy_bandwidth() / 1e9
    return {"dequantize_ms": taken, "dequantize_gb_per_s": rate, "copy_gb_per_s": copy, "dequantize_share": rate / copy}


def _prefill_memory(keys: torch.Tensor, values: torch.Tensor, config: KVarNConfig) -> dict[str, int]:
    """Peak of one prefill through a layer, beyond the keys and values that the model made."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    KVarNLayer(config).update(keys, values)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return {"prefill_peak_bytes": peak, "dense_bytes": keys.nbytes + values.nbytes}


def _show(figures: dict[str, Any], shape: torch.Size, config: KVarNConfig) -> None:
    _, heads, tokens, head_dim = shape
    title = f"{config.name}, {heads} KV heads, head_dim {head_dim}, bfloat16"
    made = table(("", 20), ("measured", 9), (" ", 20), title=title, names=("", " "))
    made.caption = f"{figures['gpu']}, torch {figures['torch']}, triton {figures['triton']}; medians"
    bandwidth = "{dequantize_gb_per_s:,.0f} GB/s, {dequantize_share:.0%} of a copy's {copy_gb_per_s:,.0f}"
    mib = {name: figures[name] / 2**20 for name in ("prefill_peak_bytes", "dense_bytes")}
    dense = "the dense cache takes {dense_bytes:.1f} MiB"
    for what, measured, beside in (
        (f"quantize K and V of {tokens:,} tokens", "{quantize_ms:.2f} ms", ""),
        (f"quantize one tile in each of {_LAYERS} layers", "{flush_ms:.2f} ms", ""),
        (f"dequantize K and V of {tokens:,} tokens", f"{figures['dequantize_ms'] * 1e3:.0f} us", bandwidth),
        ("peak memory of a prefill, beyond its input", "{prefill_peak_bytes:.1f} MiB", dense),
        ("codes that differ from the torch path's", "{differing_codes:.1e}", "each by one, at a rounding tie"),
    ):
        made.add_row(what, *(text.format(**figures | mib) for text in (measured, beside)))
    Console().print(made)
