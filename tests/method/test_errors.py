"""Errors of single tokens, split into magnitude and direction."""

import pytest
import torch

from kvarn_hf.method.errors import token_errors


class TestTokenErrors:
    def test_parts_add_up(self):
        x = torch.randn(3, 128, 64)
        x_hat = 1.2 * x + 0.1 * torch.randn_like(x)
        found = token_errors(x, x_hat)
        distance = (x - x_hat).norm(dim=-1)
        assert torch.allclose(found.magnitude + found.direction, distance.square(), rtol=1e-5)
        assert torch.allclose(found.relative, distance / x.norm(dim=-1))
        cosine = torch.cosine_similarity(x.double(), x_hat.double(), dim=-1)
        expected = 2 * x.double().norm(dim=-1) * x_hat.double().norm(dim=-1) * (1 - cosine)
        assert torch.allclose(found.direction.double(), expected, rtol=1e-3, atol=1e-4)

    def test_share_of_the_largest(self):
        x = torch.eye(4)
        # One token of wrong length and large error, three of wrong direction and small error.
        x_hat = torch.stack([3 * x[0], *(torch.nn.functional.normalize(x[i] + 0.1 * x[0], dim=0) for i in (1, 2, 3))])
        found = token_errors(x, x_hat)
        assert found.magnitude_share(0.25) == pytest.approx(1.0)
        assert found.magnitude_share(0.01) == pytest.approx(1.0)  # at least one token
        assert found.magnitude_share() == pytest.approx(0.25, abs=0.01)

    def test_tokens_of_length_zero(self):
        found = token_errors(torch.zeros(2, 4), torch.tensor([[0.0, 0, 0, 0], [1, 0, 0, 0]]))
        assert found.relative.tolist() == [0.0, float("inf")]
        assert found.magnitude_share() == pytest.approx(0.5)

    def test_bad_arguments(self):
        with pytest.raises(ValueError, match=r"restored must have the shape \[2, 4\] of original, got \[2, 3\]"):
            token_errors(torch.zeros(2, 4), torch.zeros(2, 3))
        with pytest.raises(ValueError, match=r"largest must be above 0 and at most 1, got 1\.5"):
            token_errors(torch.ones(2, 4), torch.ones(2, 4)).magnitude_share(1.5)
