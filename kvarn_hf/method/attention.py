"""Attention in plain torch over keys and values that are already dequantized: what the fused kernel must reproduce."""

from __future__ import annotations

import torch


def attention_weights(
    scores: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax over the keys and a learned sink per head: ``exp(s) / (sum exp(s) + exp(sink))``.

    Parameters
    ----------
    scores : torch.Tensor
        ``[batch, query_heads, query_tokens, keys]``, scaled.
    mask : torch.Tensor, optional
        Broadcast to the scores: bool (True attends) or added to them.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)`` before the mask.
    sinks : torch.Tensor, optional
        ``[query_heads]``: logits that take part in the softmax and have no value.

    Returns
    -------
    torch.Tensor
        The shape and dtype of ``scores``. Zeros for a query that sees nothing.
    """
    length = scores.shape[-1]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    # Not nan_to_num: a NaN among the tokens must be seen.
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(blind, 0.0)[..., :length]


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
    dropout: float = 0.0,
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
        ``[batch or 1, query_heads or 1, query_tokens, length or more]``, bool (True attends) or added to the
        scores. Without one, a query token sees everything up to itself if ``causal``, and everything otherwise.
    scaling : float
        Factor of the scores.
    sliding_window : int, optional
        A query token sees the newest ``sliding_window`` tokens only, itself included.
    softcap, sinks
        See :func:`attention_weights`.
    dropout : float
        Share of the weights that is dropped, for training.
    dtype : torch.dtype
        Of the computation and of the result.

    Returns
    -------
    torch.Tensor
        ``[batch, query_tokens, query_heads, value_dim]``. Zeros for a query that sees nothing.
    """
    queries, length, groups = query.shape[2], keys.shape[2], query.shape[1] // keys.shape[1]
    keys, values = (x.to(dtype).repeat_interleave(groups, 1) for x in (keys, values))
    position = torch.arange(length, device=query.device)
    query_position = torch.arange(length - queries, length, device=query.device)[:, None]
    mask = None if mask is None else mask[..., :length]
    if mask is None and causal:
        mask = position <= query_position
    if sliding_window is not None:
        near = position > query_position - sliding_window
        if mask is None:
            mask = near
        else:
            mask = mask & near if mask.dtype == torch.bool else mask.masked_fill(~near, -torch.inf)
    weights = attention_weights(query.to(dtype) @ keys.mT * scaling, mask, softcap=softcap, sinks=sinks)
    return (torch.nn.functional.dropout(weights, dropout) @ values).transpose(1, 2)
