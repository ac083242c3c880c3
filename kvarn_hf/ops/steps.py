"""One decode step of layers at fixed addresses, without the host knowing lengths.

The lengths of all layers are in one tensor, ``counters`` ``[layers, 4]``, int64: tokens held, tiles in use, whether
this step packs a tile, whether a token found no room. The operators are ``torch.library`` operators, which
``torch.compile`` takes as they are: what a launch depends on is read on the device.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvarn_hf.checks import check_like
from kvarn_hf.method.attention import attention
from kvarn_hf.ops import dispatch
from kvarn_hf.ops.commit import commit
from kvarn_hf.ops.dispatch import attend_held, scheme
from kvarn_hf.state.storage import Layout, put, state_of, views, whole_state


def check_tokens(keys: torch.Tensor, values: torch.Tensor, layout: Layout, device: torch.device) -> None:
    """Refuse tokens that are not like those held."""
    for name, x, dim in (("key_states", keys, layout.key_dim), ("value_states", values, layout.value_dim)):
        check_like(name, x, (layout.batch, layout.heads, dim), layout.token_dtype, device)


@torch.library.custom_op("kvarn_hf::advance", mutates_args=("counters",))
def advance(counters: torch.Tensor, layout: str) -> None:
    """Begin a step of one token in every layer."""
    shape = Layout.parse(layout)
    if dispatch.uses_kernels(counters.device):
        from kvarn_kernels.append import advance as kernel

        return kernel(counters, _kernel_shape(shape))
    length, count = counters[:, 0].clone(), counters[:, 1].clone()
    behind = length - shape.sink_length - shape.residual_length
    ready = torch.maximum(torch.div(behind, shape.tile_size, rounding_mode="floor"), count)
    room = length < shape.most
    counters.copy_(torch.stack([length + room, torch.where(room, ready, count), (ready - count) * room, ~room], 1))


@torch.library.custom_op("kvarn_hf::pack", mutates_args=("storages",))
def pack(
    storages: list[torch.Tensor], layers: list[int], table: torch.Tensor, counters: torch.Tensor, layout: str
) -> None:
    """Pack the tile that is due in these ``layers``, which have these storages.

    ``table`` is :func:`addresses` of every layer. After an interrupt, finished layers are not packed again.
    """
    shape = Layout.parse(layout)
    if dispatch.uses_kernels(counters.device):
        return _pack_by_kernel(counters, table, shape)
    done: list[int] = []
    try:
        for storage, layer in zip(storages, layers, strict=True):
            length, count, due, _ = counters[layer].tolist()
            if due:
                state = commit(state_of(storage, shape, length - 1, count - due))
                put(state, state.padding, storage, shape)
            done.append(layer)
    except BaseException:
        counters[done, 2] = 0
        raise


@torch.library.custom_op("kvarn_hf::write", mutates_args=("storage",))
def write(
    storage: torch.Tensor, counters: torch.Tensor, layer: int, keys: torch.Tensor, values: torch.Tensor, layout: str
) -> None:
    """Write one token per row behind the tail. Doing it again changes nothing."""
    shape = Layout.parse(layout)
    v = views(storage, shape)
    if dispatch.uses_kernels(keys.device):
        from kvarn_kernels.append import write as kernel

        return kernel(keys, values, counters[layer], v["dense_keys"], v["dense_values"], _kernel_shape(shape))
    length, count, _, full = counters[layer].tolist()
    if not full:
        index = length - 1 - count * shape.tile_size
        v["dense_keys"][:, :, index], v["dense_values"][:, :, index] = keys[:, :, 0], values[:, :, 0]


@write.register_fake
def _(storage, counters, layer, keys, values, layout):  # type: ignore[no-untyped-def]
    check_tokens(keys, values, Layout.parse(layout), storage.device)


@torch.library.custom_op("kvarn_hf::attend", mutates_args=("storage",))
def attend(
    query: torch.Tensor,
    keys: torch.Tensor | None,
    values: torch.Tensor | None,
    storage: torch.Tensor,
    counters: torch.Tensor,
    layer: int,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    layout: str,
    scaling: float,
    softcap: float,
) -> torch.Tensor:
    """Attention of the newest token over everything held; ``[batch, 1, query_heads, value_dim]``.

    That token's ``keys`` and ``values``, if given, are written first, as :func:`write` does. A ``softcap`` of 0 is
    none. If the token found no room, the result is NaN.
    """
    shape = Layout.parse(layout)
    token = None if keys is None or values is None else (keys, values)
    options: dict[str, Any] = {"scaling": scaling, "softcap": softcap or None, "sinks": sinks}
    if dispatch.uses_kernels(query.device):
        step = _kernel_step(counters[layer], token)
        out = attend_held(_held(storage, shape), query, mask, step=step, **options)
        if out is not None:
            return out
    if token is not None:
        write(storage, counters, layer, *token, layout)
    if dispatch.uses_kernels(query.device):
        return _attend_dense(query, storage, counters, layer, mask, layout, options)
    length, count, _, full = counters[layer].tolist()
    state = state_of(storage, shape, length, count)
    mask = None if mask is None else mask[..., :length]
    out = dispatch.attend(state, query, mask, **options)
    if out is None:
        out = _exact(query, *dispatch.dense(state), mask, **options)
    return out.fill_(torch.nan) if full else out


@attend.register_fake
def _(query, keys, values, storage, counters, layer, mask, sinks, layout, scaling, softcap):  # type: ignore[no-untyped-def]
    if keys is not None:
        check_tokens(keys, values, Layout.parse(layout), storage.device)
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], Layout.parse(layout).value_dim)


@torch.library.custom_op("kvarn_hf::read", mutates_args=())
def read(storage: torch.Tensor, counters: torch.Tensor, layer: int, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """All keys and values, dense, ``[batch, heads, most, head_dim]``; zero behind the last token."""
    shape = Layout.parse(layout)
    state, size, sink = whole_state(storage, shape), shape.tile_size, shape.sink_length
    length, count = counters[layer, 0], counters[layer, 1]
    if state.padding is not None:  # sinks move behind the padding with the first tile
        state = replace(state, padding=replace(state.padding, run=state.padding.run * (count > 0)))
    tail_start = torch.where(count > 0, sink + count * size, 0)
    index = torch.arange(shape.dense, device=storage.device)
    position = torch.where(count > 0, index + count * size, index)
    valid = (position < length) & ((index >= sink) | (count == 0))
    nowhere = max(shape.most, sink + shape.tiles * size)
    position = torch.where(valid, position, nowhere)

    def whole(packed: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        out = packed.new_zeros(*packed.shape[:2], nowhere + 1, packed.shape[3])
        in_tiles = torch.arange(packed.shape[2], device=packed.device) < tail_start
        out[:, :, : packed.shape[2]] = packed.masked_fill(~in_tiles[:, None], 0)
        return out.index_copy(2, position, dense)[:, :, : shape.most].contiguous()

    keys, values = dispatch.dense(state)
    return whole(keys, state.dense.key_buffer), whole(values, state.dense.value_buffer)


@read.register_fake
def _(storage, counters, layer, layout):  # type: ignore[no-untyped-def]
    shape = Layout.parse(layout)
    lead = shape.batch, shape.heads, shape.most
    return tuple(storage.new_empty(*lead, dim, dtype=shape.token_dtype) for dim in (shape.key_dim, shape.value_dim))


def addresses(storage: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Of a layer's tensors, as the packing kernel wants them: all but the run's tokens, in the storage's order."""
    v = views(storage, layout)
    return torch.tensor([x.data_ptr() for name, x in v.items() if name not in ("padding.key", "padding.value")])


def may_skip_pack(counters: torch.Tensor) -> bool:
    """Whether :func:`pack` would only wait for its kernel to be compiled; not to be asked in compiled code."""
    if not dispatch.uses_kernels(counters.device):
        return False
    from kvarn_kernels.append import may_skip_pack as asked

    return asked(counters)


def compile_ahead(
    storage: torch.Tensor,
    table: torch.Tensor,
    counters: torch.Tensor,
    layer: int,
    layout: Layout,
    query_heads: int | None,
) -> None:
    """Begin to compile the kernels of :func:`attend`, if it is to be called (with so many ``query_heads``), and of
    :func:`pack`, which takes longest and is needed least soon, while the host has other things to do."""
    if not dispatch.uses_kernels(storage.device):
        return

    def tokens(heads: int, dim: int) -> torch.Tensor:  # as attention modules hand them over
        empty = torch.empty(layout.batch, 1, heads, dim, dtype=layout.token_dtype, device=storage.device)
        return empty.transpose(1, 2)

    if query_heads is not None:
        # As generate() masks a compiled step.
        mask = torch.empty(layout.batch, 1, 1, layout.most, dtype=torch.bool, device=storage.device)
        token = tokens(layout.heads, layout.key_dim), tokens(layout.heads, layout.value_dim)
        query, step = tokens(query_heads, layout.key_dim), _kernel_step(counters[layer], token)
        attend_held(_held(storage, layout), query, mask, scaling=1.0, step=step, ahead=True)
    _pack_by_kernel(counters, table, layout, ahead=True)


def _held(storage: torch.Tensor, layout: Layout) -> Any:
    """A layer as the kernels that read it take it; lengths are the most there can be."""
    from kvarn_kernels import Held, Packed, Run

    v = views(storage, layout)
    keys, values = (Packed(*(v[f"{side}.{name}"] for name in Packed._fields)) for side in ("keys", "values"))
    return Held(
        keys,
        values,
        v["prescale"] if layout.method == "kvarn" else None,
        None,
        v["dense_keys"],
        v["dense_values"],
        Run(v["padding.length"], v["padding.key"], v["padding.value"]) if layout.padded else None,
        layout.tiles,
        layout.sink_length,
        scheme(layout),
    )


def _kernel_step(counters: torch.Tensor, token: tuple[torch.Tensor, torch.Tensor] | None) -> Any:
    from kvarn_kernels import Step

    return Step(counters, *(token or ()))


@lru_cache(maxsize=256)
def _kernel_shape(layout: Layout) -> Any:
    """What the kernels of a step are told of a layer."""
    from kvarn_kernels.append import LayerShape

    return LayerShape(
        layout.batch,
        layout.heads,
        layout.key_dim,
        layout.value_dim,
        layout.token_dtype,
        layout.most,
        layout.tiles,
        layout.dense,
        layout.sink_length,
        layout.residual_length,
        layout.tile_size,
        bool(layout.padded),
    )


def _pack_by_kernel(counters: torch.Tensor, table: torch.Tensor, layout: Layout, ahead: bool = False) -> None:
    from kvarn_kernels.append import pack as kernel

    kernel(counters, table, _kernel_shape(layout), scheme(layout), ahead=ahead)


def _attend_dense(
    query: torch.Tensor,
    storage: torch.Tensor,
    counters: torch.Tensor,
    layer: int,
    mask: torch.Tensor | None,
    layout: str,
    options: dict[str, Any],
) -> torch.Tensor:
    """What the kernel does not take, on a GPU: over all the room there is, masked behind the last token."""
    keys, values = read(storage, counters, layer, layout)
    held = (torch.arange(keys.shape[2], device=query.device) < counters[layer, 0])[None, None, None]
    if mask is None:
        mask = held
    else:
        mask = mask[..., : keys.shape[2]]
        mask = mask & held if mask.dtype == torch.bool else mask.masked_fill(~held, -torch.inf)
    out = _exact(query, keys, values, mask.expand(query.shape[0], -1, -1, -1), **options)
    return out.masked_fill(counters[layer, 3] > 0, torch.nan)


def _exact(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    if sinks is None and softcap is None:
        groups = query.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling).transpose(1, 2)
    options: dict[str, Any] = {"scaling": scaling, "softcap": softcap, "sinks": sinks, "dtype": torch.float32}
    return attention(query, keys, values, mask, causal=False, **options).to(query.dtype)
