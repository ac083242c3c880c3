"""Hadamard rotation along head_dim, in plain torch."""

from __future__ import annotations

from functools import cache

import torch

# The transform of order 128 is that of order 16 and one of order 8: two small matrix products beat seven butterflies,
# whose every stage would read and write the whole tensor.
_RADIX = 16


def rotation_block(head_dim: int) -> int:
    """The largest power of two that divides ``head_dim``: the order of the Hadamard blocks.

    >>> [rotation_block(d) for d in (64, 80, 96, 128)]
    [64, 16, 32, 128]
    """
    return head_dim & -head_dim


@cache
def hadamard(order: int) -> torch.Tensor:
    """The orthonormal Hadamard matrix in Sylvester's order: ``H[i, j] = (-1) ** popcount(i & j) / sqrt(order)``.

    Parameters
    ----------
    order : int
        A power of two.

    Returns
    -------
    torch.Tensor
        ``[order, order]``, float32, symmetric, its own inverse.
    """
    # It is kept, so it must not depend on the modes and defaults of the first caller.
    with torch.inference_mode(False):
        matrix = torch.ones(1, 1, dtype=torch.float32, device="cpu")
        while matrix.shape[0] < order:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
        return matrix / order**0.5


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Apply the block-diagonal Hadamard rotation to the last dimension: ``y = x @ diag(H, ..., H)``.

    A fast Walsh-Hadamard transform of radix 16, O(head_dim log head_dim) per token. The rotation is orthonormal and its
    own inverse, so the same function rotates and un-rotates.

    Parameters
    ----------
    x : torch.Tensor
        ``[..., head_dim]``, any head_dim; floating point of at least float32.

    Returns
    -------
    torch.Tensor
        Same shape and dtype.

    Notes
    -----
    KVarN, arXiv:2606.03458, section 3.3. A head_dim that is no power of two is cut into blocks of
    :func:`rotation_block` channels.
    """
    block, stride = rotation_block(x.shape[-1]), 1
    y = x.reshape(-1, x.shape[-1])
    # What is stored must not depend on the precision of the model's products.
    with torch.autocast(x.device.type, enabled=False):
        while stride < block:
            radix = min(_RADIX, block // stride)
            matrix = hadamard(radix).to(device=x.device, dtype=x.dtype, non_blocking=True)
            if stride == 1:
                y = (y.reshape(-1, radix) @ matrix).reshape(y.shape)
            else:
                y = (matrix @ y.reshape(-1, radix, stride)).reshape(y.shape)
            stride *= radix
    return y.reshape(x.shape)
