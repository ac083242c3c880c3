"""Attention in plain torch over keys and values that are already dequantized: what the fused kernel must reproduce."""

from __future__ import annotations

import torch


def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scaling: float,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """``softmax(scaling q k^T + mask) v``, computed in ``dtype``.

    Parameters
    ----------
    query : torch.Tensor
        ``[batch, query_heads, query_tokens, key_dim]``: the newest tokens.
    keys, values : torch.Tensor
        ``[batch, heads, length, head_dim]``; ``heads`` divides ``query_heads``.
    mask : torch.Tensor, optional
        ``[batch or 1, query_heads or 1, query_tokens or 1, length or more]``, bool (True attends) or added to the
        scores. Without one, a query token sees everything up to itself if ``causal``, and everything otherwise.
    scaling : float
        Factor of the scores.
    sliding_window : int, optional
        A query token sees the newest ``sliding_window`` tokens only, itself included.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)``.
    sinks : torch.Tensor, optional
        ``[query_heads]``: logits that take part in the softmax and have no value.
    dtype : torch.dtype
        Of the computation and of the result.

    Returns
    -------
    torch.Tensor
        ``[batch, query_tokens, query_heads, value_dim]``. Zeros for a query that sees nothing.
    """
    weights = attention_weights(
        query,
        keys,
        mask,
        scaling=scaling,
        causal=causal,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        dtype=dtype,
    )
    return (weights @ values.to(dtype).repeat_interleave(query.shape[1] // keys.shape[1], 1)).transpose(1, 2)


def attention_weights(
    query: torch.Tensor,
    keys: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scaling: float,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """The weights of :func:`attention`, ``[batch, query_heads, query_tokens, length]``; the arguments are the same."""
    queries, length, groups = query.shape[2], keys.shape[2], query.shape[1] // keys.shape[1]
    score = query.to(dtype) @ keys.to(dtype).repeat_interleave(groups, 1).mT * scaling
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    position = torch.arange(length, device=query.device)
    query_position = torch.arange(length - queries, length, device=query.device)[:, None]
    if mask is not None:
        mask = mask[..., :length]
        score = score.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else score + mask.to(dtype)
    elif causal:
        score = score.masked_fill(position > query_position, -torch.inf)
    if sliding_window is not None:
        score = score.masked_fill(position <= query_position - sliding_window, -torch.inf)
    if sinks is not None:
        extra = sinks.to(dtype)[:, None, None].expand(*score.shape[:-1], 1)
        score = torch.cat([score, extra], -1)
    # Not nan_to_num: a NaN among the tokens must be seen.
    return score.softmax(-1).masked_fill((score == -torch.inf).all(-1, keepdim=True), 0.0)[..., :length]
