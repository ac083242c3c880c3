"""The attention implementation "kvarn": fused over packed tiles where it can be, ``sdpa`` otherwise.

    model.set_attn_implementation("kvarn")          # or from_pretrained(..., attn_implementation="kvarn")

It differs from the automatic path under ``sdpa`` in what it takes (soft-capping, learned sinks) and in what it saves:
for one new token it needs the padding mask only, and never looks at its values, which would stall the GPU at every
step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask

from kvarn_hf.layers.reading import dense, reading_of
from kvarn_hf.method.attention import attention

NAME = "kvarn"


def kvarn_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function of Transformers' ``AttentionInterface``.

    Parameters
    ----------
    module : torch.nn.Module
        The attention module of the model.
    query : torch.Tensor
        ``[batch, query_heads, new_tokens, head_dim]``.
    key, value : torch.Tensor
        ``[batch, kv_heads, length, head_dim]``, dense or from a KVarN cache.
    attention_mask : torch.Tensor, optional
        ``[batch or 1, query_heads or 1, new_tokens or 1, length]``, boolean (True: attend) or additive.
    dropout, scaling, is_causal
        As in Transformers.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)`` (Gemma 2).
    s_aux : torch.Tensor, optional
        ``[query_heads]``: a learned logit per head that takes attention and gives nothing (gpt-oss).

    Returns
    -------
    output : torch.Tensor
        ``[batch, new_tokens, query_heads, value_dim]``.
    weights : None
    """
    reading = reading_of(key, value)
    if reading is not None and not dropout and (query.shape[2] == 1 or attention_mask is not None):
        out = reading.attend(query, attention_mask, scaling=scaling, softcap=softcap, sinks=s_aux)
        if out is not None:
            return out, None
    key, value = (dense(x) for x in (key, value))
    if softcap is None and s_aux is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    # Soft-capping and learned sinks, which ``sdpa`` does not have.
    options: dict[str, Any] = {"softcap": softcap, "sinks": s_aux, "dropout": dropout, "dtype": torch.float32}
    options["scaling"] = query.shape[3] ** -0.5 if scaling is None else scaling
    options["causal"] = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return attention(query, key, value, attention_mask, **options).to(query.dtype).contiguous(), None


def kvarn_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Mask function of Transformers' ``AttentionMaskInterface``: boolean, ``[batch, 1, new_tokens, length]``, or None.

    One new token attends to all that is not padding, so the padding mask is the whole mask, and nothing has to look at
    its values to find that out.
    """
    # With a static cache there are keys behind the newest token; only a padding mask that ends there hides them.
    ends_here = attention_mask is not None and attention_mask.shape[-1] < kv_length
    plain = q_length == 1 and mask_function is causal_mask_function and local_size is None
    if plain and (allow_is_causal_skip is not False or ends_here):
        padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        return None if padding is None else padding[:, None, None, kv_offset : kv_offset + kv_length].to(torch.bool)
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        **({} if allow_is_causal_skip is None else {"allow_is_causal_skip": allow_is_causal_skip}),
        **kwargs,
    )


def register() -> None:
    """Make "kvarn" known to Transformers."""
    AttentionInterface.register(NAME, kvarn_attention)
    AttentionMaskInterface.register(NAME, kvarn_mask)
