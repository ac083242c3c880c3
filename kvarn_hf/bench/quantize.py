"""Times the quantizing and the dequantizing kernel on this machine's GPU, after checking what they compute."""

from __future__ import annotations

from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from kvarn_hf import ops
from kvarn_hf.config import KVarNConfig
from kvarn_hf.layers.growing import KVarNLayer
from kvarn_hf.method import packing
from kvarn_hf.method import quantize as reference
from kvarn_hf.method.quantize import Packed
from kvarn_hf.state.layer_state import LayerState
from kvarn_hf.state.tiles import PackedTiles

_LAYERS = 36
_COPY_BYTES = 1 << 30


def quantize(
    tokens: int = 32768, heads: int = 8, head_dim: int = 128, preset: str = "kvarn_k4v2_g128"
) -> dict[str, float | str]:
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
        inputs) and ``dense_bytes``; ``gpu``, ``torch``, ``triton``.

    Raises
    ------
    RuntimeError
        If there is no GPU that the kernels run on, or they compute something other than the torch path.
    """
    import triton

    if not torch.cuda.is_available() or not ops.uses_kernels(torch.device("cuda", torch.cuda.current_device())):
        raise RuntimeError("the quantization benchmark needs a GPU that the Triton kernels run on")
    config = KVarNConfig.from_preset(preset)
    tokens -= tokens % config.tile_size
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (1, heads, tokens, head_dim)
    keys, values = (torch.randn(shape, device="cuda", generator=generator).bfloat16() for _ in range(2))
    figures: dict[str, float | str] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "differing_codes": _differing_codes(keys[:, :, :8192], values[:, :, :8192], config),
        "quantize_ms": _milliseconds(_quantizing(keys, values, config)),
    }
    tile = slice(0, config.tile_size)
    flushes = [_quantizing(keys[:, :, tile].clone(), values[:, :, tile].clone(), config) for _ in range(_LAYERS)]
    figures["flush_ms"] = _milliseconds(lambda: [flush() for flush in flushes])
    figures.update(_dequantizing(keys, values, config))
    figures.update(_prefill_memory(keys, values, config))
    _show(figures, shape, config)
    return figures


def _milliseconds(call: Callable[[], object]) -> float:
    """Median, the cache of the GPU flushed before every call."""
    from triton.testing import do_bench

    return do_bench(call, warmup=50, rep=200, return_mode="median")


def _graph_milliseconds(call: Callable[[], object]) -> float:
    """Median over replays of a CUDA graph: what the GPU takes, however slowly Python launches it."""
    from triton.testing import do_bench_cudagraph

    with torch.cuda.stream(torch.cuda.Stream()):
        return do_bench_cudagraph(call, rep=100, return_mode="median")


def _quantizing(keys: torch.Tensor, values: torch.Tensor, config: KVarNConfig) -> Callable[[], None]:
    """A call that quantizes these tokens into arenas that are there already."""
    batch, heads, length, key_dim = keys.shape
    tiles = PackedTiles.allocate(
        batch, heads, key_dim, values.shape[3], config, length // config.tile_size, keys.device
    )
    prescale = ops.key_prescale(keys[:, :, : config.tile_size]) if config.method == "kvarn" else None
    return lambda: ops.quantize(keys, values, prescale, tiles, config, config.sink_length, None)


def _differing_codes(keys: torch.Tensor, values: torch.Tensor, config: KVarNConfig) -> float:
    """Share of codes that differ from the torch path's; any that differ by more than one are an error."""
    batch, heads, length, key_dim = keys.shape
    size, count = config.tile_size, length // config.tile_size
    tiles = PackedTiles.allocate(batch, heads, key_dim, values.shape[3], config, count, keys.device)
    prescale = ops.key_prescale(keys[:, :, :size])
    ops.quantize(keys, values, prescale, tiles, config, config.sink_length, None)
    key_tiles, value_tiles = (x.unflatten(2, (-1, size)) for x in (keys, values))
    expected = (
        packing.unpack_keys(reference.quantize_keys(key_tiles, prescale.unsqueeze(2), config).codes, config.key_bits),
        packing.unpack_values(reference.quantize_values(value_tiles, config).codes, config.value_bits),
    )
    actual = (
        packing.unpack_keys(tiles.keys.codes[:, :, :count], config.key_bits),
        packing.unpack_values(tiles.values.codes[:, :, :count], config.value_bits),
    )
    difference = torch.cat([(a.short() - b.short()).abs().flatten() for a, b in zip(expected, actual, strict=True)])
    share = (difference > 0).double().mean().item()
    if difference.max() > 1 or share > 1e-3:
        raise RuntimeError(
            f"the kernel's codes are not the torch path's: {share:.1e} of them differ, by up to {difference.max()}"
        )
    return share


def _dequantizing(keys: torch.Tensor, values: torch.Tensor, config: KVarNConfig) -> dict[str, float]:
    state = ops.commit(LayerState.empty(config, keys, values).appended(keys, values))
    sink, tail, tiles = config.sink_length, state.tail_start, state.tiles
    if not tiles.count:
        raise RuntimeError(
            f"tokens must be more than {sink + config.residual_length} for a tile to be packed, got {keys.shape[2]}"
        )
    prescale = None if state.prescale is None else state.prescale.unsqueeze(2)
    few = slice(0, min(8, tiles.count))
    key_part, value_part = (Packed(*(t[:, :, few] for t in part)) for part in tiles.filled())
    expected = reference.dequantize_keys(key_part, prescale, config), reference.dequantize_values(value_part, config)
    for name, want, got, given in zip(("keys", "values"), expected, ops.dense(state), (keys, values), strict=True):
        if not (
            torch.equal(got[:, :, :sink], given[:, :, :sink]) and torch.equal(got[:, :, tail:], given[:, :, tail:])
        ):
            raise RuntimeError(f"the dense {name} came back changed")
        want = want.flatten(2, 3)
        difference = (got[:, :, sink : sink + want.shape[2]].float() - want).norm() / want.norm()
        if not difference < 4e-3:  # bfloat16
            raise RuntimeError(f"the dequantized {name} are not the torch path's: relative difference {difference:.1e}")
    milliseconds = _graph_milliseconds(lambda: ops.dense(state))
    packed = sum(t[:, :, : tiles.count].nbytes for t in (*tiles.keys, *tiles.values))
    moved = packed + keys.nbytes + values.nbytes + state.dense.keys.nbytes + state.dense.values.nbytes
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * _COPY_BYTES / _milliseconds(lambda: target.copy_(source)) / 1e6
    return {
        "dequantize_ms": milliseconds,
        "dequantize_gb_per_s": moved / milliseconds / 1e6,
        "copy_gb_per_s": copy,
        "dequantize_share": moved / milliseconds / 1e6 / copy,
    }


def _prefill_memory(keys: torch.Tensor, values: torch.Tensor, config: KVarNConfig) -> dict[str, float]:
    """Peak of one prefill through a layer, beyond the keys and values that the model made."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    KVarNLayer(config).update(keys, values)
    torch.cuda.synchronize()
    return {
        "prefill_peak_bytes": torch.cuda.max_memory_allocated() - before,
        "dense_bytes": keys.nbytes + values.nbytes,
    }


def _show(figures: dict, shape: tuple[int, ...], config: KVarNConfig) -> None:
    _, heads, tokens, head_dim = shape
    table = Table(
        title=f"{config.name}, {heads} KV heads, head_dim {head_dim}, bfloat16",
        caption=f"{figures['gpu']}, torch {figures['torch']}, triton {figures['triton']}; medians",
    )
    table.add_column("")
    table.add_column("measured", justify="right")
    table.add_column("")
    table.add_row(f"quantize K and V of {tokens:,} tokens", f"{figures['quantize_ms']:.2f} ms", "")
    table.add_row(f"quantize one tile in each of {_LAYERS} layers", f"{figures['flush_ms']:.2f} ms", "")
    table.add_row(
        f"dequantize K and V of {tokens:,} tokens",
        f"{figures['dequantize_ms'] * 1e3:.0f} us",
        f"{figures['dequantize_gb_per_s']:,.0f} GB/s, {figures['dequantize_share']:.0%} of "
        f"a copy's {figures['copy_gb_per_s']:,.0f}",
    )
    table.add_row(
        "peak memory of a prefill, beyond its input",
        f"{figures['prefill_peak_bytes'] / 2**20:.1f} MiB",
        f"the dense cache takes {figures['dense_bytes'] / 2**20:.1f} MiB",
    )
    table.add_row(
        "codes that differ from the torch path's", f"{figures['differing_codes']:.1e}", "each by one, at a rounding tie"
    )
    Console().print(table)
