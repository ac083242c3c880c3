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

from functools import partial
from typing import Any, NamedTuple

import torch

from kvarn_kernels.arithmetic import INTERPRETED, LOG2E
from kvarn_kernels.attention_kernels import Form, combine_kernel, split_kernel
from kvarn_kernels.bundles import Held, Step, constant
from kvarn_kernels.launch import begin, finish, on_device_of, power_of_two, side
from kvarn_kernels.launch_table import Tuning, programs_at_once, tuning_for
from kvarn_kernels.schedule import Cut, Work, plan

_MOST_TOKENS = 16
_MOST_COLUMNS = 8  # query heads x query tokens that one program takes
_FEW_ENTRIES = 8  # which one warp joins for all of its columns
_COUNTERS, _SINKS = -4, -1  # their places in the arrays of a call


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
    held: Held,
    mask: torch.Tensor | None = None,
    *,
    scaling: float,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    step: Step | None = None,
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
    held : Held
        What the layer holds; dense tokens in the dtype of ``query``, with any strides but for the last dimension.
    mask : torch.Tensor, optional
        ``[batch or 1, 1 or query_heads, query_tokens, tokens or more]``, bool (True attends) or added to the scores.
        Without one, a query token sees everything up to itself if ``causal``, and everything otherwise.
    scaling : float
        Factor of the scores.
    sliding_window : int, optional
        A query token sees the newest ``sliding_window`` tokens only, itself included.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)``.
    sinks : torch.Tensor, optional
        ``[query_heads]``: logits that take part in the softmax and have no value.
    step : Step, optional
        Where lengths are read on the device. The dense tensors are then buffers of which the first part is in use, and
        ``held.count`` is the most tiles that there can be. The step's key and value, if given, are written to their
        place in the dense tensors first, if there is room; without room the result is NaN.
    tuning : Tuning, optional
        How to launch; None looks it up in :mod:`kvarn_kernels.launch_table`.
    slices : int
        Into how many slices each KV head's tokens are cut; 0 lets it follow from how many programs run at once.
    ahead : bool
        Only begin to compile the kernels (see :func:`kvarn_kernels.launch.begin`); the result is then empty.

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
    counters, key, value = (None, None, None) if step is None else step
    if key is not None and value is not None and (key.stride(3) != 1 or value.stride(3) != 1):
        key, value = key.contiguous(), value.contiguous()
    mask_of_all, mask_strides = False, [0, 0, 0]
    if mask is not None:
        mask_of_all = mask.shape[1] == mask.shape[2] == 1
        mask_strides = [0 if mask.shape[i] == 1 else mask.stride(i) for i in range(3)]
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    dense_length = held.dense_keys.shape[2]
    arrays = (
        *(query, *held.keys, *held.values, held.prescale, held.rows, held.dense_keys, held.dense_values),
        *((None, None, None) if held.padding is None else held.padding),
        *(mask, counters, key, value, sinks),
    )
    addresses = tuple([0 if x is None else x.data_ptr() for x in arrays])
    see_all = mask is not None or not causal
    kind = _Kind(
        query.device.index,
        (query.dtype, None if mask is None else mask.dtype, None if sinks is None else sinks.dtype),
        query.shape,
        held.keys.codes.shape[1],
        held.tile_size,
        held.values.channel_scale.shape[-1],
        (held.scheme.key_bits, held.scheme.value_bits, held.scheme.method != "rtn"),
        tuple([x is not None for x in arrays]),
        not see_all and query.shape[2] > 1,
        not see_all and dense_length - held.sink_length < query.shape[2],
        sliding_window is not None,
        softcap is not None,
        mask_of_all,
        (
            *(*_strides(query), *_strides(held.dense_keys), *_strides(held.dense_values)),
            *(*_strides(key)[:2], *_strides(value)[:2]),
        ),
        tuple([x & 15 for x in addresses]),
        tuning,
    )
    lengths = held.tile_count, dense_length, slices
    if ahead:
        begin(split_kernel, partial(_prepare, kind, arrays, *lengths))
        return query.new_empty(0)
    call = _PREPARED.get(kind)
    if call is None:
        if not supported(query, kind.value_dim, kind.tile, *kind.scheme[:2]):
            raise ValueError(
                f"query must hold 1 to {_MOST_TOKENS} tokens per row in float16 or bfloat16 and head_dims must be "
                f"multiples of 16 up to 256, got {tuple(query.shape)}, {query.dtype} and {kind.value_dim} for values"
            )
        finish(split_kernel)
        call = _PREPARED.get(kind) or _prepare(kind, arrays, *lengths)
    sizes = kind.heads, held.tile_count, held.capacity, dense_length, held.sink_length
    numbers = *sizes, scaling * LOG2E.value, sliding_window or 0, (softcap or 0.0) * LOG2E.value
    with on_device_of(query):
        return call.launch(arrays, addresses, (*kind.strides, *mask_strides), numbers, slices)


def _strides(x: torch.Tensor | None) -> tuple[int, ...]:
    """Of the first three dimensions; 0 for those of length 1, whose strides say nothing."""
    if x is None:
        return 0, 0, 0
    return tuple([stride if length > 1 else 0 for length, stride in zip(x.shape[:3], x.stride(), strict=False)])


class _Kind(NamedTuple):
    """Everything that the compiled kernels of a call depend on."""

    device: int | None
    dtypes: tuple[torch.dtype | None, ...]  # of query, mask and sinks
    query_shape: torch.Size
    heads: int
    tile: int
    value_dim: int
    scheme: tuple[int, int, bool]  # bits of keys and values, whether tiles are rotated
    given: tuple[bool, ...]  # which arrays there are
    causal: bool
    tile_causal: bool
    window: bool
    cap: bool
    mask_of_all: bool
    strides: tuple[int, ...]
    alignments: tuple[int, ...]
    tuning: Tuning | None


class _Prepared:
    """The compiled kernels of one kind of call, launched as they are: Triton's look-up costs more than the launch."""

    def __init__(self, kind: _Kind, arrays: tuple[torch.Tensor | None, ...]) -> None:
        batch, query_heads, queries, key_dim = kind.query_shape
        key_bits, value_bits, rotated = kind.scheme
        columns = query_heads // kind.heads * queries
        cols = 4 if columns <= 4 else _MOST_COLUMNS
        keys = side(True, key_dim, key_bits, rotated, least=32)
        values = side(False, kind.value_dim, value_bits, rotated, least=64)
        tuning = kind.tuning or tuning_for(kind.device, cols, max(keys.PADDED, values.PADDED))
        self.kind, self.tuning = kind, tuning
        self.work = Work(queries, columns, cols, kind.tile, tuning.block, tuning.weight)
        self.form = Form(
            self.work,
            keys,
            values,
            kind.causal,
            kind.tile_causal,
            kind.window,
            kind.cap,
            kind.mask_of_all,
            tuning.stages,
            tuning.dense_stages,
        )
        self.units = batch * kind.heads * -(-columns // cols)
        self.out_shape = batch, queries, query_heads, kind.value_dim
        self.on_device = arrays[_COUNTERS] is not None  # where lengths are
        self.combines: dict[int, tuple[Any, tuple[int, ...], tuple[Any, ...]]] = {}
        self.split: Any = split_kernel
        if INTERPRETED:
            self.programs = programs_at_once(None, None)
            return
        part = torch.empty(4, dtype=torch.float32, device=torch.device("cuda", kind.device or 0))
        self.split = split_kernel.warmup(
            *arrays[:_SINKS],
            part,
            *kind.strides,
            *(2,) * 3,
            *(kind.heads, *(2,) * 4, 1.0, 2, 1.0, 2),
            constant(self.form),
            grid=(1,),
            num_warps=tuning.warps,
            **({} if tuning.registers is None else {"maxnreg": tuning.registers}),
        )
        self.split._init_handles()
        self.programs = programs_at_once(self.split, kind.device)

    def launch(
        self,
        arrays: tuple[torch.Tensor | None, ...],
        addresses: tuple[int, ...],
        strides: tuple[int, ...],
        numbers: tuple[Any, ...],
        slices: int,
    ) -> torch.Tensor:
        """The attention of such a call: ``numbers`` are those of :func:`split_kernel` up to ``cap``."""
        heads, count, _, dense_length, sink_length, *_ = numbers
        cut, entries = self.cut(count, dense_length, slices)
        rows_of_part = self.units * entries * self.work.COLS
        lse_start = rows_of_part * self.form.VALUES.PADDED
        device = torch.device("cpu") if self.kind.device is None else torch.device("cuda", self.kind.device)
        part = torch.empty(lse_start + rows_of_part, dtype=torch.float32, device=device)
        out = torch.empty(self.out_shape, dtype=self.kind.dtypes[0], device=device)
        # Compiled kernels take addresses, the interpreter takes tensors.
        given: tuple[Any, ...] = (*arrays, part, out) if INTERPRETED else (*addresses, part.data_ptr(), out.data_ptr())
        *held, counters, key, value, sinks, to_part, to_out = given
        self.split[(self.units, cut.slices, 1)](
            *(*held, counters, key, value, to_part), *strides, *numbers, lse_start, self.form
        )
        combine, grid, constants = self.combine(entries, arrays[_SINKS], arrays[_COUNTERS])
        combine[grid](
            *(to_part, sinks, to_out, counters), *(heads, entries, cut.slices, sink_length, lse_start), *constants
        )
        return out

    def cut(self, count: int, dense_length: int, slices: int = 0) -> tuple[Cut, int]:
        """How the work is cut, and how many results there are room for."""
        cut = plan(self.programs, self.units, count, dense_length, self.tuning.block, self.tuning.weight, slices)
        return cut, cut.slices + 1 if self.on_device else cut.entries

    def combine(
        self, entries: int, sinks: torch.Tensor | None, counters: torch.Tensor | None
    ) -> tuple[Any, tuple[int, ...], tuple[Any, ...]]:
        """The kernel that joins so many results, its grid and its constants."""
        most = power_of_two(entries)
        if most not in self.combines:
            work, values = self.work, self.form.VALUES
            # So few columns and channels per program that the results fit its registers.
            taken, room = (work.COLS, 2048 // work.COLS) if most <= _FEW_ENTRIES else (1, 4096)
            channels = min(values.PADDED, max(16, room // most))
            grid = self.out_shape[0] * self.kind.heads, -(-work.COLUMNS // taken), values.PADDED // channels
            constants = work, values, most, taken, channels
            self.combines[most] = self._compiled_combine(sinks, counters, constants), grid, constants
        return self.combines[most]

    def _compiled_combine(
        self, sinks: torch.Tensor | None, counters: torch.Tensor | None, constants: tuple[Any, ...]
    ) -> Any:
        if INTERPRETED:
            return combine_kernel
        device = torch.device("cuda", self.kind.device or 0)
        part, out = (torch.empty(4, dtype=dtype, device=device) for dtype in (torch.float32, self.kind.dtypes[0]))
        numbers = self.kind.heads, *(2,) * 4
        few = constants[2] <= _FEW_ENTRIES
        return combine_kernel.warmup(
            *(part, sinks, out, counters), *numbers, *map(constant, constants), grid=(1,), num_warps=1 if few else 4
        )


_PREPARED: dict[_Kind, _Prepared] = {}
_MOST_PREPARED = 1024  # kinds of calls differ in capacities that grow, too


def _prepare(
    kind: _Kind, arrays: tuple[torch.Tensor | None, ...], count: int, dense_length: int, slices: int
) -> _Prepared:
    """Compile what such a call needs."""
    query: Any = arrays[0]
    with on_device_of(query):  # another thread may have another
        call = _Prepared(kind, arrays)
        _, entries = call.cut(count, dense_length, slices)
        call.combine(entries, arrays[_SINKS], arrays[_COUNTERS])
    if len(_PREPARED) >= _MOST_PREPARED:
        _PREPARED.clear()
    _PREPARED[kind] = call
    return call
