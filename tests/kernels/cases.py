"""Inputs that are hard on a tile, and both implementations side by side."""

from __future__ import annotations

import torch

from kvarn_hf import ops
from kvarn_hf.config import KVarNConfig
from kvarn_hf.method import packing
from kvarn_hf.method import quantize as reference
from kvarn_hf.state.tiles import PackedTiles


def tokens(shape, dtype=torch.float32, device="cpu", seed=0, outlier_channel=30.0):
    """Normal tokens ``[batch, heads, tokens, head_dim]`` with a few channels and tokens that are larger than the
    rest."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x = x * torch.rand((*shape[:2], 1, shape[3]), generator=generator).mul(2).exp()
    x[..., 1] *= outlier_channel
    x[:, :, ::37] *= 4
    return x.to(device=device, dtype=dtype)


def quantize_both(keys, values, config, position=0, first=None, slot=0):
    """Tiles of the torch path and of the kernel: the arenas hold ``slot`` poisoned tiles before them."""
    from kvarn_kernels import Packed, quantize_tiles

    batch, heads, length, key_dim = keys.shape
    count = length // config.tile_size
    prescale = None
    if config.method == "kvarn":
        prescale = ops.key_prescale(keys[:, :, : config.tile_size])
    shape = (batch, heads, key_dim, values.shape[3])

    def arena():
        tiles = PackedTiles.allocate(*shape, config, slot + count, keys.device).truncated(slot)
        for tensor in tiles.parts.values():
            tensor.fill_(torch.nan if tensor.is_floating_point() else 255)
        return tiles

    expected, actual = arena(), arena()
    _quantize_in_torch(keys, values, prescale, expected, config, position, first)
    arenas = Packed(*actual.keys), Packed(*actual.values)
    quantize_tiles(keys, values, prescale, first, *arenas, ops.scheme(config), slot=slot, position=position)
    for tensor in actual.parts.values():  # nothing but its own slots is written
        poison = tensor[:, :, :slot].float()
        assert bool(((poison == 255) | poison.isnan()).all())
        poison = tensor[:, :, slot + count :].float()
        assert bool(((poison == 255) | poison.isnan()).all())
    return expected.truncated(slot + count), actual.truncated(slot + count), prescale


def _quantize_in_torch(keys, values, prescale, tiles, config, position, first):
    """The torch path of :func:`kvarn_hf.ops.quantize`, on any device."""
    if first is not None:
        keys, values = (ops.repeat_counted(x, first - position, config.tile_size) for x in (keys, values))
    keys, values = (x.unflatten(2, (-1, config.tile_size)) for x in (keys, values))
    prescale = None if prescale is None else prescale.unsqueeze(2)
    for arena, packed in (
        (tiles.keys, reference.quantize_keys(keys, prescale, config)),
        (tiles.values, reference.quantize_values(values, config)),
    ):
        for target, source in zip(arena, packed, strict=True):
            target[:, :, tiles.count : tiles.count + source.shape[2]] = source


def codes_of(tiles: PackedTiles, config: KVarNConfig, slot=0):
    """Key and value codes of the tiles from ``slot`` on, int16."""
    keys = packing.unpack_keys(tiles.keys.codes[:, :, slot : tiles.count], config.key_bits)
    values = packing.unpack_values(tiles.values.codes[:, :, slot : tiles.count], config.value_bits)
    return keys.short(), values.short()


def dequantized(tiles: PackedTiles, prescale, config: KVarNConfig, slot=0):
    """Keys and values ``[batch, heads, tokens, head_dim]`` of the tiles from ``slot`` on, by the torch path."""
    keys, values = (
        reference.Packed(*(t[:, :, slot : tiles.count] for t in part)) for part in (tiles.keys, tiles.values)
    )
    prescale = None if prescale is None else prescale.unsqueeze(2)
    keys = reference.dequantize_keys(keys, prescale, config)
    return keys.flatten(2, 3), reference.dequantize_values(values, config).flatten(2, 3)


def error(x, original):
    """Relative error in the Frobenius norm, in float64."""
    original = original.double()
    return ((x.double() - original).norm() / original.norm()).item()
