"""Attention of a few new tokens over a packed cache: codes feed the int8 tensor cores, no scale ever touches a code.

With the rotated query q' = H (q / prescale), and c the codes of one tile::

    score_t  = token_scale_t (sum_d (q'_d channel_scale_d) c_td + sum_d q'_d zero_point_d)
    out_d    = channel_scale_d (sum_t (p_t token_scale_t) c_td + sum_t p_t zero_point_t)

so only the small vectors, q' and p, are scaled. They are written as two int8 digits (x ~ 256 high + low, 16 bits of the
largest entry of that tile), neighbouring columns of the small operand of an integer matrix product, whose sums are
exact.

Two launches, of the kernels in :mod:`kvarn_kernels.attention_kernels`. ``split_kernel``: every program attends over a
slice of the dense tokens (sinks and tail) and the tiles. ``combine_kernel``: joins the slices by their log-sum-exp and
adds learned sinks.
"""

from __future__ import annotations

import functools
import operator
import os
from typing import Any, NamedTuple

import torch
import triton.language as tl

from kvarn_kernels.attention_kernels import combine_kernel, split_kernel
from kvarn_kernels.launch import begin, finish, on_device_of, padded, power_of_two, rotation_block
from kvarn_kernels.launch_table import Cut, Tuning, plan, programs_at_once, tuning_for

LOG2E = 1.4426950408889634
# Inline assembly does not run in Triton's interpreter, which is how the arithmetic is tested without a GPU.
_ASSEMBLY = os.environ.get("TRITON_INTERPRET", "0") != "1"
_SPLIT_DTYPE = tl.bfloat16 if _ASSEMBLY else tl.float32

_MOST_TOKENS = 16
_MOST_COLUMNS = 8  # query heads x query tokens that one program takes
_FEW_ENTRIES = 8  # which one warp joins for all of its columns


def supported(query: torch.Tensor, value_dim: int, tile_size: int, key_bits: int, value_bits: int) -> bool:
    """Whether :func:`decode_attention` takes such a call.

    Parameters
    ----------
    query : torch.Tensor
        ``[batch, query_heads, query_tokens, key_dim]``.
    value_dim, tile_size, key_bits, value_bits : int
        Of the cache.
    """
    return (
        query.dtype in (torch.float16, torch.bfloat16)
        and 1 <= query.shape[2] <= _MOST_TOKENS
        and all(16 <= dim <= 256 and dim % 16 == 0 for dim in (query.shape[3], value_dim))
        and tile_size in (64, 128)
        and {key_bits, value_bits} <= {2, 3, 4, 8}
    )


def decode_attention(
    query: torch.Tensor,
    key_arena: tuple[torch.Tensor, ...],
    value_arena: tuple[torch.Tensor, ...],
    prescale: torch.Tensor | None,
    rows: torch.Tensor | None,
    dense_keys: torch.Tensor,
    dense_values: torch.Tensor,
    padding: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    mask: torch.Tensor | None,
    progress: torch.Tensor | None = None,
    token: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    count: int,
    sink_length: int,
    key_bits: int,
    value_bits: int,
    rotated: bool,
    scaling: float,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    tuning: Tuning | None = None,
    slices: int = 0,
    ahead: bool = False,
) -> torch.Tensor:
    """Attention of the newest ``query_tokens`` tokens over sinks, packed tiles and tail, in two launches.

    ``out = softmax(scaling q k^T + mask) v``, with k and v what dequantizing the cache would give.

    Parameters
    ----------
    query : torch.Tensor
        ``[batch, query_heads, query_tokens, key_dim]``, float16 or bfloat16, 1 to 16 tokens, any strides.
    key_arena, value_arena : tuple of torch.Tensor
        Codes, channel scale, token scale and zero point, ``[rows, heads, capacity, ...]``, contiguous.
    prescale : torch.Tensor, optional
        ``[batch, heads, key_dim]``, float16: the query is divided by it.
    rows : torch.Tensor, optional
        ``[batch]``, int64: each batch row's arena row; None means its own.
    dense_keys, dense_values : torch.Tensor
        ``[batch, heads, tokens, head_dim]``, the sinks and then the tail; the dtype of ``query``, any strides but for
        the last dimension.
    padding : tuple of torch.Tensor, optional
        Length ``[batch]`` (int64) of the run of identical tokens that each row begins with, and that token's key and
        value ``[batch, heads, 1, head_dim]``. The sinks then stand behind the run.
    mask : torch.Tensor, optional
        ``[batch or 1, 1 or query_heads, query_tokens, tokens or more]``, bool (True attends) or added to the scores.
        Without one, a query token sees everything up to itself if ``causal``, and everything otherwise.
    progress : torch.Tensor, optional
        ``[4]``, int64: tokens held, tiles in use, anything, and whether a token found no room, for which the result is
        NaN. Then the dense tensors are buffers of which the first part is in use, and ``count`` is the most tiles
        there can be. For CUDA graphs, in which lengths change and launches do not.
    token : tuple of torch.Tensor, optional
        Key and value ``[batch, heads, 1, head_dim]`` of the newest token, any strides but for the last dimension,
        which are written to their place in the dense tensors first, if there is room; with ``progress`` only, which
        counts it.
    count : int
        Tiles in use.
    sink_length, key_bits, value_bits : int
        Of the cache.
    rotated : bool
        Whether tiles are stored rotated.
    scaling : float
        Factor of the scores.
    sliding_window : int, optional
        A query token sees the newest ``sliding_window`` tokens only, itself included.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)``.
    sinks : torch.Tensor, optional
        ``[query_heads]``: logits that take part in the softmax and have no value.
    tuning : Tuning, optional
        How to launch; None looks it up in :mod:`kvarn_kernels.launch_table`.
    slices : int
        Into how many slices each KV head's tokens are cut; 0 lets it follow from how many programs run at once.
    ahead : bool
        Only begin to compile the kernels, in a thread of its own; the result is then empty.

    Returns
    -------
    torch.Tensor
        ``[batch, query_tokens, query_heads, value_dim]``, contiguous, the dtype of ``query``. The same bits at every
        call.

    Raises
    ------
    ValueError
        If the call is one that :func:`supported` refuses.
    """
    if query.stride(3) != 1:
        query = query.contiguous()
    if token is not None and (token[0].stride(3) != 1 or token[1].stride(3) != 1):
        token = token[0].contiguous(), token[1].contiguous()
    heads, capacity, tile = key_arena[0].shape[1], key_arena[0].shape[2], key_arena[2].shape[-1]
    value_dim = value_arena[1].shape[-1]
    mask_kind, mask_strides = 0, [0, 0, 0]
    if mask is not None:
        mask_kind = 1 if mask.dtype == torch.bool else 2
        mask_strides = [0 if mask.shape[i] == 1 else mask.stride(i) for i in range(3)]
        mask = mask.view(torch.uint8) if mask_kind == 1 else mask
        mask_kind += 2 if mask.shape[1] == mask.shape[2] == 1 else 0
    arrays: tuple[torch.Tensor | None, ...] = (
        *(query, *key_arena, *value_arena, prescale, rows, dense_keys, dense_values),
        *((None, None, None) if padding is None else padding),
        mask,
        progress,
        *((None, None) if token is None else token),
        sinks,
    )
    addresses = tuple([0 if x is None else x.data_ptr() for x in arrays])
    misaligned = functools.reduce(operator.or_, addresses) & 15
    strides = (*_strides(query), *_strides(dense_keys), *_strides(dense_values))
    strides += (0,) * 4 if token is None else (*_strides(token[0])[:2], *_strides(token[1])[:2])
    dense_length = dense_keys.shape[2]
    see_all = mask_kind > 0 or not causal
    kind = _Kind(
        query.device.index,
        query.dtype,
        query.shape,
        heads,
        tile,
        value_dim,
        key_bits,
        value_bits,
        rotated,
        prescale is not None,
        rows is not None,
        padding is not None,
        see_all,
        not see_all and dense_length - sink_length < query.shape[2],
        sliding_window is not None,
        softcap is not None,
        mask_kind,
        None if mask is None else mask.dtype,
        None if sinks is None else sinks.dtype,
        progress is not None,
        token is not None,
        strides,
        tuple([x & 15 for x in addresses]) if misaligned else None,
        tuning,
    )
    with on_device_of(query):
        if ahead:
            begin(split_kernel, functools.partial(_prepare_all, kind, arrays, count, dense_length))
            return query.new_empty(0)
        call = _PREPARED.get(kind)
        if call is None:
            if not supported(query, value_dim, tile, key_bits, value_bits):
                raise ValueError(
                    f"query must hold 1 to {_MOST_TOKENS} tokens per row in float16 or bfloat16 and head_dims must be "
                    f"multiples of 16 up to 256, got {tuple(query.shape)}, {query.dtype} and value head_dim {value_dim}"
                )
            finish(split_kernel)
            call = _PREPARED.get(kind) or _remember(kind, _Prepared(kind, arrays))
        cut, entries = call.cut(count, dense_length, slices)
        rows_of_part = call.units * entries * call.cols
        lse_start = rows_of_part * call.value_pad
        part = torch.empty(lse_start + rows_of_part, dtype=torch.float32, device=query.device)
        out = torch.empty(call.out_shape, dtype=query.dtype, device=query.device)
        # Compiled kernels take addresses, the interpreter takes tensors.
        given: tuple[Any, ...] = (*addresses, part.data_ptr(), out.data_ptr()) if _ASSEMBLY else (*arrays, part, out)
        *of_split, of_progress, of_key, of_value, of_sinks, of_part, of_out = given
        call.split[(call.units, cut.slices, 1)](
            *of_split,
            of_progress,
            of_key,
            of_value,
            of_part,
            *strides,
            *mask_strides,
            heads,
            count,
            capacity,
            dense_length,
            sink_length,
            scaling * LOG2E,
            sliding_window or 0,
            (softcap or 0.0) * LOG2E,
            lse_start,
            *call.split_constants,
        )
        padded_entries = power_of_two(entries)
        combine = call.combine.get(padded_entries)
        if combine is None:
            combine = call.prepare_combine(padded_entries, part, sinks, out, progress)
        taken, channels = call.combine_block(padded_entries)
        combine[(call.units // call.blocks, -(-call.columns // taken), call.value_pad // channels)](
            of_part,
            of_sinks,
            of_out,
            of_progress,
            heads,
            entries,
            cut.slices,
            sink_length,
            lse_start,
            *call.combine_constants(padded_entries),
        )
    return out


def _strides(x: torch.Tensor) -> tuple[int, ...]:
    """Of the first three dimensions; 0 for those of length 1, whose strides say nothing."""
    return tuple([stride if length > 1 else 0 for length, stride in zip(x.shape[:3], x.stride(), strict=False)])


class _Kind(NamedTuple):
    """Everything that the compiled kernels of a call depend on."""

    device: int | None
    dtype: torch.dtype
    query_shape: torch.Size
    heads: int
    tile: int
    value_dim: int
    key_bits: int
    value_bits: int
    rotated: bool
    prescale: bool
    rows: bool
    padded: bool
    see_all: bool
    tile_causal: bool
    window: bool
    cap: bool
    mask: int
    mask_dtype: torch.dtype | None
    sinks_dtype: torch.dtype | None
    progress: bool
    token: bool
    strides: tuple[int, ...]
    misaligned: tuple[int, ...] | None
    tuning: Tuning | None


class _Prepared:
    """The compiled kernels of one kind of call, launched as they are: Triton's look-up costs more than the launch."""

    def __init__(self, kind: _Kind, arrays: tuple[torch.Tensor | None, ...]) -> None:
        batch, query_heads, queries, key_dim = kind.query_shape
        value_dim = kind.value_dim
        columns = query_heads // kind.heads * queries
        cols = 4 if columns <= 4 else _MOST_COLUMNS
        key_pad, value_pad = padded(key_dim, 32), padded(value_dim, 64)
        tuning = kind.tuning or tuning_for(kind.device, cols, max(key_pad, value_pad))
        self.tuning, self.columns, self.cols, self.value_pad = tuning, columns, cols, value_pad
        self.blocks = -(-columns // cols)
        self.units = batch * kind.heads * self.blocks
        self.out_shape = (batch, queries, query_heads, value_dim)
        self.combine: dict[int, Any] = {}
        self.on_device = kind.progress  # where lengths are
        self.split_constants = (
            queries,
            columns,
            cols,
            kind.tile,
            tuning.block,
            tuning.weight,
            key_dim,
            key_pad,
            value_dim,
            value_pad,
            kind.key_bits,
            kind.value_bits,
            _block_bits(key_dim) if kind.rotated else 0,
            _block_bits(value_dim) if kind.rotated else 0,
            kind.prescale,
            kind.rows,
            kind.padded,
            queries > 1 and not kind.see_all,
            kind.tile_causal,
            kind.window,
            kind.cap,
            kind.mask,
            _SPLIT_DTYPE,
            tuning.stages,
            tuning.dense_stages,
            _ASSEMBLY,
        )
        self._combine_constants = (queries, columns, cols, value_dim, value_pad, kind.tile, tuning.block, tuning.weight)
        self._has_sinks = kind.sinks_dtype is not None
        if not _ASSEMBLY:
            self.split = split_kernel
            self.programs = programs_at_once(None, None)
            return
        part = torch.empty(4, dtype=torch.float32, device=torch.device("cuda", kind.device or 0))
        numbers = (kind.heads, *(2,) * 4, 1.0, 2, 1.0, 2)
        self.split = split_kernel.warmup(
            *arrays[:-1],
            part,
            *kind.strides,
            *(2,) * 3,
            *numbers,
            *self.split_constants,
            grid=(1,),
            num_warps=tuning.warps,
            **({} if tuning.registers is None else {"maxnreg": tuning.registers}),
        )
        self.split._init_handles()
        self.programs = programs_at_once(self.split, kind.device)

    def cut(self, count: int, dense_length: int, slices: int = 0) -> tuple[Cut, int]:
        """How the work is cut, and how many results there are room for."""
        cut = plan(self.programs, self.units, count, dense_length, self.tuning.block, self.tuning.weight, slices)
        return cut, cut.slices + 1 if self.on_device else cut.entries

    def combine_block(self, padded_entries: int) -> tuple[int, int]:
        """Columns and channels per program, so few that a program's entries fit its registers."""
        if padded_entries <= _FEW_ENTRIES:
            taken, channels = self.cols, 2048 // (padded_entries * self.cols)
        else:
            taken, channels = 1, 4096 // padded_entries
        return taken, min(self.value_pad, max(16, channels))

    def combine_constants(self, padded_entries: int) -> tuple[int | bool, ...]:
        return (*self._combine_constants, padded_entries, *self.combine_block(padded_entries), self._has_sinks)

    def prepare_combine(
        self,
        padded_entries: int,
        part: torch.Tensor,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
        progress: torch.Tensor | None,
    ) -> Any:
        combine: Any = combine_kernel
        if _ASSEMBLY:
            heads = self.out_shape[2] // (self.columns // self.out_shape[1])
            combine = combine_kernel.warmup(
                part,
                sinks,
                out,
                progress,
                heads,
                *(2,) * 4,
                *self.combine_constants(padded_entries),
                grid=(1,),
                num_warps=1 if padded_entries <= _FEW_ENTRIES else 4,
            )
        self.combine[padded_entries] = combine
        return combine


_PREPARED: dict[_Kind, _Prepared] = {}
_MOST_PREPARED = 1024  # kinds of calls differ in capacities that grow, too


def _remember(kind: _Kind, call: _Prepared) -> _Prepared:
    if len(_PREPARED) >= _MOST_PREPARED:
        _PREPARED.clear()
    _PREPARED[kind] = call
    return call


def _prepare_all(kind: _Kind, arrays: tuple[torch.Tensor | None, ...], count: int, dense_length: int) -> None:
    """All that a call will need, in another thread."""
    query: Any = arrays[0]
    with on_device_of(query):
        call = _Prepared(kind, arrays)
        _, entries = call.cut(count, dense_length)
        part, out = query.new_empty(4, dtype=torch.float32), query.new_empty(4)
        *_, progress, _, _, sinks = arrays
        call.prepare_combine(power_of_two(entries), part, sinks, out, progress)
        _remember(kind, call)


def _block_bits(dim: int) -> int:
    return rotation_block(dim).bit_length() - 1
