"""The fast transform against multiplication by the explicit matrix."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kvarn_hf.method.rotation import hadamard, rotate, rotation_block

HEAD_DIMS = (8, 16, 24, 32, 40, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)


def explicit_matrix(head_dim):
    """``diag(H, ..., H)`` in float64, entry by entry from the definition."""
    block = head_dim
    while block % 2 == 0:
        block //= 2
    block = head_dim // block  # the largest power of two that divides head_dim
    matrix = np.zeros((head_dim, head_dim))
    for start in range(0, head_dim, block):
        for i in range(block):
            for j in range(block):
                matrix[start + i, start + j] = (-1) ** (i & j).bit_count() / np.sqrt(block)
    return torch.from_numpy(matrix)


def gaussian(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_is_multiplication_by_the_block_hadamard_matrix(head_dim):
    x, matrix = gaussian(7, head_dim), explicit_matrix(head_dim)
    torch.testing.assert_close(rotate(x), x @ matrix, rtol=0, atol=2e-6)
    torch.testing.assert_close(rotate(x.float()).double(), x @ matrix, rtol=0, atol=5e-6)


@pytest.mark.parametrize("order", [1, 2, 4, 8, 16, 64, 512])
def test_hadamard_matrix_is_symmetric_orthonormal_and_sylvesters(order):
    matrix = hadamard(order)
    assert matrix.shape == (order, order)
    assert torch.equal(matrix, matrix.T)
    torch.testing.assert_close(matrix @ matrix, torch.eye(order), rtol=0, atol=1e-5)
    torch.testing.assert_close(matrix.double(), explicit_matrix(order), rtol=0, atol=1e-7)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_orthonormal_and_its_own_inverse(head_dim):
    x = gaussian(3, 2, 5, head_dim)
    y = rotate(x)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-6, atol=0)
    torch.testing.assert_close(rotate(y), x, rtol=0, atol=2e-6)
    identity = torch.eye(head_dim, dtype=torch.float64)
    torch.testing.assert_close(rotate(identity) @ rotate(identity).T, identity, rtol=0, atol=2e-6)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_preserves_attention_scores(head_dim):
    query, keys = gaussian(4, head_dim, seed=1), gaussian(9, head_dim, seed=2)
    keys[:, 3] *= 40  # a channel like Qwen2.5's key bias
    torch.testing.assert_close(rotate(query) @ rotate(keys).T, query @ keys.T, rtol=1e-6, atol=1e-5)


def test_spreads_an_outlier_channel_over_its_block():
    for head_dim in (128, 96):
        x = torch.zeros(head_dim)
        x[5] = 1.0
        y, block = rotate(x), rotation_block(head_dim)
        assert torch.allclose(y[:block].abs(), torch.full((block,), block**-0.5))
        assert (y[block:] == 0).all()


def test_any_strides_and_leading_dimensions():
    x = gaussian(2, 3, 5, 64, dtype=torch.float32)
    expected = rotate(x)
    for view in (x.transpose(1, 2).contiguous().transpose(1, 2), x.repeat_interleave(2, -1)[..., ::2]):
        assert not view.is_contiguous()
        assert torch.equal(view, x)
        torch.testing.assert_close(rotate(view), expected, rtol=0, atol=1e-6)
    assert rotate(gaussian(64)).shape == (64,)
    assert rotate(x[:0]).shape == (0, 3, 5, 64)


def test_keeps_its_input():
    x = gaussian(4, 128)
    before = x.clone()
    rotate(x)
    assert torch.equal(x, before)


def flops(head_dim, tokens=64):
    with FlopCounterMode(display=False) as counter:
        rotate(torch.zeros(tokens, head_dim))
    return counter.get_total_flops() / tokens


def test_operations_grow_as_n_log_n():
    counts = {n: flops(n) for n in (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 65536)}
    assert all(count > 0 for count in counts.values())
    for n, count in counts.items():
        # log16(n) stages, rounded up, of one multiplication and one addition by 16 entries each.
        assert count <= 2 * 16 * n * -(-n.bit_length() // 4)
    # An explicit matrix would cost 2 n per channel, which is 512 times as much here; the logarithm grows 3-fold.
    per_channel = {n: count / n for n, count in counts.items()}
    assert per_channel[65536] / per_channel[128] < 3
    assert counts[4096] < 2 * 4096**2 / 80


@pytest.mark.parametrize("head_dim", [80, 96, 112, 192])
def test_blocks_cost_as_much_as_whole_transforms_of_their_order(head_dim):
    block = rotation_block(head_dim)
    assert flops(head_dim) == flops(block) * head_dim / block
