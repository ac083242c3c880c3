"""The error of quantized keys and values, split into what is wrong with a token's length and with its direction."""

from __future__ import annotations

from typing import NamedTuple

import torch


class TokenErrors(NamedTuple):
    """Squared errors of token vectors, ``[..., tokens]``: their sum is ``|x - x_hat|**2``.

    Parameters
    ----------
    magnitude : torch.Tensor
        ``(|x| - |x_hat|)**2``.
    direction : torch.Tensor
        ``2 |x| |x_hat| (1 - cos(x, x_hat))``.
    relative : torch.Tensor
        ``|x - x_hat| / |x|``, without unit; 0 for a token of length 0 that stayed so, infinite for one that did not.
    """

    magnitude: torch.Tensor
    direction: torch.Tensor
    relative: torch.Tensor

    def magnitude_share(self, largest: float = 1.0) -> float:
        """The share of a token's squared error that is magnitude, averaged over the tokens with the largest errors.

        Parameters
        ----------
        largest : float
            Which of all tokens count, by relative error: 0.05 takes the worst 5 % (at least one token).

        Raises
        ------
        ValueError
            If ``largest`` is not above 0 and at most 1.
        """
        if not 0 < largest <= 1:
            raise ValueError(f"largest must be above 0 and at most 1, got {largest}")
        relative = self.relative.flatten()
        worst = relative.topk(max(1, round(largest * relative.numel()))).indices
        magnitude, direction = (part.flatten()[worst] for part in (self.magnitude, self.direction))
        total = magnitude + direction
        return torch.where(total > 0, magnitude / total, 0.0).mean().item()


def token_errors(original: torch.Tensor, restored: torch.Tensor) -> TokenErrors:
    """Split ``|x - x_hat|**2`` into magnitude and direction, token by token.

    Parameters
    ----------
    original, restored : torch.Tensor
        ``[..., tokens, head_dim]``: keys or values before quantization, and what is read back.

    Returns
    -------
    TokenErrors
        float32.

    Raises
    ------
    ValueError
        If the shapes differ.

    Notes
    -----
    Equation 3 of arXiv:2606.03458: ``|x|^2 + |x_hat|^2 - 2 |x| |x_hat|`` and ``2 |x| |x_hat| (1 - cos)``.

    Examples
    --------
    >>> errors = token_errors(torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([[6.0, 8.0], [0.0, 1.0]]))
    >>> errors.magnitude.tolist(), errors.direction.round(decimals=3).tolist()
    ([25.0, 0.0], [0.0, 2.0])
    """
    if original.shape != restored.shape:
        raise ValueError(f"restored must have the shape {list(original.shape)} of original, got {list(restored.shape)}")
    x, x_hat = original.float(), restored.float()
    norm, norm_hat, distance = x.norm(dim=-1), x_hat.norm(dim=-1), (x - x_hat).norm(dim=-1)
    magnitude = (norm - norm_hat).square()
    # From the distance and not from the cosine, whose difference from 1 would be lost in rounding.
    direction = (distance.square() - magnitude).clamp_min(0)
    relative = torch.where(distance > 0, distance / norm, 0.0)
    return TokenErrors(magnitude, direction, relative)
