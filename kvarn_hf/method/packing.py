"""How codes become bytes, in plain torch.

The order is chosen for the decoding kernel, which unpacks whole 32-bit words with a mask and hands them to the tensor
cores as they are: consecutive bytes are consecutive channels of a key tile and consecutive tokens of a value tile.

    keys     byte [j, d]  holds, at bits [b*i, b*i + b), the code of channel d, token  j + i * tile_size * b / 8
    values   byte [e, t]  holds, at bits [b*i, b*i + b), the code of token t, channel  e * 8 / b + i

A 3-bit code is stored as two planes, its two low bits (b = 2) followed by its high bit (b = 1).
"""

from __future__ import annotations

import torch

_PLANES = {2: ((0, 2),), 3: ((0, 2), (2, 1)), 4: ((0, 4),), 8: ((0, 8),)}


def _shifts(bits: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=device)


def pack_keys(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack key codes ``[..., tile_size, head_dim]`` (uint8) into bytes ``[..., tile_size * bits / 8, head_dim]``."""
    planes = []
    for low, width in _PLANES[bits]:
        plane = (codes >> low) & (2**width - 1)
        plane = plane.unflatten(-2, (8 // width, -1))  # [..., i, j, channel]
        planes.append((plane << _shifts(width, codes.device)[:, None, None]).sum(-3, dtype=torch.uint8))
    return torch.cat(planes, -2)


def unpack_keys(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Inverse of :func:`pack_keys`: bytes to codes ``[..., tile_size, head_dim]``, uint8."""
    parts = []
    for plane, (low, width) in zip(_planes(packed, bits), _PLANES[bits], strict=True):
        part = (plane.unsqueeze(-3) >> _shifts(width, packed.device)[:, None, None]) & (2**width - 1)
        parts.append(part.flatten(-3, -2) << low)
    return parts[0] if len(parts) == 1 else parts[0] | parts[1]


def pack_values(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack value codes ``[..., tile_size, head_dim]`` (uint8) into bytes ``[..., head_dim * bits / 8, tile_size]``."""
    planes = []
    for low, width in _PLANES[bits]:
        plane = (codes >> low) & (2**width - 1)
        plane = plane.unflatten(-1, (-1, 8 // width))  # [..., token, e, i]
        planes.append((plane << _shifts(width, codes.device)).sum(-1, dtype=torch.uint8).mT)
    return torch.cat(planes, -2)


def unpack_values(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Inverse of :func:`pack_values`: bytes to codes ``[..., tile_size, head_dim]``, uint8."""
    parts = []
    for plane, (low, width) in zip(_planes(packed, bits), _PLANES[bits], strict=True):
        part = (plane.mT.unsqueeze(-1) >> _shifts(width, packed.device)) & (2**width - 1)
        parts.append(part.flatten(-2) << low)
    return parts[0] if len(parts) == 1 else parts[0] | parts[1]


def _planes(packed: torch.Tensor, bits: int) -> tuple[torch.Tensor, ...]:
    return packed.split([packed.shape[-2] * width // bits for _, width in _PLANES[bits]], -2)
