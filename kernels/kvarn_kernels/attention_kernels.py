"""The two kernels of the decode attention; :mod:`kvarn_kernels.decode_attention` has the method and the launches."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kvarn_kernels.arithmetic import LOG2E
from kvarn_kernels.attention_rotation import block_bits, rotated_query, unrotated
from kvarn_kernels.bundles import Packed, Side, load_channels, store_channels, tile_sizes
from kvarn_kernels.int8_dot import Codes, codes_dot, column_max, exp2, near_first
from kvarn_kernels.schedule import Work, blocks_before, schedule, tiles_before


class Form(NamedTuple):
    """What :func:`split_kernel` is compiled for.

    WORK : Work
    KEYS, VALUES : Side
    CAUSAL, TILE_CAUSAL : whether dense tokens, and tiles, may hold tokens that a query must not see
    WINDOW, CAP : whether there is a sliding window, a soft cap
    MASK_OF_ALL : whether there is a mask that is the same for all columns
    STAGES, DENSE_STAGES : of the loops over tiles and over dense tokens
    """

    WORK: Work
    KEYS: Side
    VALUES: Side
    CAUSAL: bool
    TILE_CAUSAL: bool
    WINDOW: bool
    CAP: bool
    MASK_OF_ALL: bool
    STAGES: int
    DENSE_STAGES: int


class Columns(NamedTuple):
    """A program's query columns ``[COLS]``: whether there is one, its query head, its new token, and its offset."""

    known: Any
    head: Any
    token: Any
    offset: Any


class Sequence(NamedTuple):
    """One sequence of the batch: where its tokens are, and which of them a query sees.

    pad : its padding, before the sinks; None if no sequence has any
    sink_length, tail_start, length : the tiles begin behind the sinks and end at the tail
    mask : pointer to its mask (uint8: nonzero attends; another dtype: added), or None
    stride_head, stride_token : of the mask
    window, cap : the sliding window and the soft cap, if there are
    """

    pad: Any
    sink_length: Any
    tail_start: Any
    length: Any
    mask: Any
    stride_head: Any
    stride_token: Any
    window: Any
    cap: Any


class Dense(NamedTuple):
    """Dense keys or values of one head, their stride, and the token of the row's padding (None: no row has any)."""

    ptr: Any
    stride: Any
    run: Any


class Entry(NamedTuple):
    """Where a result goes: the output [COLS, VALUES.PADDED] and its log2-sum-exp2 [COLS], float32."""

    out: Any
    lse: Any


@triton.jit
def _lengths(counters_ptr, TILE: tl.constexpr):
    """Tiles and dense tokens, as the device knows them."""
    count = tl.load(counters_ptr + 1).to(tl.int32)
    return count, tl.load(counters_ptr).to(tl.int32) - count * TILE


@triton.jit
def _columns(first, head, stride_head, stride_token, COLS: tl.constexpr, WORK: tl.constexpr):
    """:class:`Columns` ``first`` on of a KV head."""
    column = first + tl.arange(0, COLS)
    known = column < WORK.COLUMNS
    query_head = head * (WORK.COLUMNS // WORK.QUERIES) + column // WORK.QUERIES
    token = column % WORK.QUERIES
    return Columns(known, query_head, token, query_head * stride_head + token * stride_token)


@triton.jit
def _mask_of_all(position, sequence):
    """What a mask that is the same for all columns says of tokens."""
    return tl.load(sequence.mask + position, mask=position < sequence.length, other=0)


@triton.jit
def _biased(score, position, mask_of_all, columns, sequence, CAUSAL: tl.constexpr, FORM: tl.constexpr):
    """Scores (base 2) [TOKENS, COLS], soft-capped, and -inf where a query may not see a token.

    position [TOKENS]; mask_of_all [TOKENS], read if FORM.MASK_OF_ALL.
    """
    if FORM.CAP:  # cap tanh(x / cap), by an exponential that cannot overflow
        small = tl.exp2(tl.abs(score) * (-2 * LOG2E) / sequence.cap)
        size = sequence.cap * (1 - small) / (1 + small)
        score = tl.where(score < 0, -size, size)
    query_position = sequence.length - FORM.WORK.QUERIES + columns.token
    if CAUSAL:
        score = tl.where(position[:, None] <= query_position[None, :], score, float("-inf"))
    if FORM.WINDOW:
        score = tl.where(position[:, None] > (query_position - sequence.window)[None, :], score, float("-inf"))
    if FORM.MASK_OF_ALL:
        if sequence.mask.dtype.element_ty == tl.uint8:
            score = tl.where((mask_of_all != 0)[:, None], score, float("-inf"))
        else:
            score += (mask_of_all.to(tl.float32) * LOG2E)[:, None]
    elif sequence.mask is not None:
        of_column = columns.head * sequence.stride_head + columns.token * sequence.stride_token
        where = sequence.mask + of_column[None, :] + position[:, None]
        known = columns.known[None, :] & (position < sequence.length)[:, None]
        if sequence.mask.dtype.element_ty == tl.uint8:
            score = tl.where(tl.load(where, mask=known, other=0) != 0, score, float("-inf"))
        else:
            score += tl.load(where, mask=known, other=0.0).to(tl.float32) * LOG2E
    return score


@triton.jit
def _keep(pointer, x, mask=None):
    """Store what :func:`combine_kernel` reads next.

    It is to stay in the L2 cache: what streams through would push it out, and the kernel would take 2 % longer.
    """
    tl.store(pointer, x, mask=mask, eviction_policy="evict_last")


@triton.constexpr_function
def _codes_per_byte(bits):
    """3-bit codes are held as two bits and one, and the two come first."""
    return 8 // (2 if bits == 3 else bits)


@triton.jit
def _by_channel(ptr, index, channel, SIDE: tl.constexpr):
    """The ``index``-th vector of DIM numbers, in fp32 and zero from DIM on."""
    if SIDE.DIM == SIDE.PADDED:
        return tl.load(ptr + index * SIDE.DIM + channel).to(tl.float32)
    else:
        return tl.load(ptr + index * SIDE.DIM + channel, mask=channel < SIDE.DIM, other=0.0).to(tl.float32)


@triton.jit
def _attend_tiles(q, first, last, arena, keys, values, sequence, columns, entry, FORM: tl.constexpr):
    """Attention over tiles ``first .. last`` of one head, whose first is the arena's ``arena``-th.

    q [KEYS.PADDED, COLS], fp32: the rotated query. The output is un-rotated.
    """
    TILE: tl.constexpr = FORM.WORK.TILE
    COLS: tl.constexpr = FORM.WORK.COLS
    KEYS: tl.constexpr = FORM.KEYS
    VALUES: tl.constexpr = FORM.VALUES
    KEY_ROWS: tl.constexpr = TILE // _codes_per_byte(KEYS.BITS)
    PER_BYTE: tl.constexpr = _codes_per_byte(VALUES.BITS)
    KEY_BYTES: tl.constexpr = tile_sizes(TILE, KEYS).codes
    VALUE_BYTES: tl.constexpr = tile_sizes(TILE, VALUES).codes
    # Key rows are loaded in an order that gives each thread neighbouring tokens: four probabilities make one word of
    # digits.
    GROUP: tl.constexpr = 32 if KEY_ROWS >= 32 else 16
    NEAR: tl.constexpr = GROUP // 8
    slot = tl.arange(0, KEY_ROWS)
    key_row = slot // GROUP * GROUP + slot % 8 * NEAR + slot % GROUP // 8
    channel, t = tl.arange(0, KEYS.PADDED), tl.arange(0, TILE)
    out_channel, value_row = tl.arange(0, VALUES.PADDED), tl.arange(0, VALUES.PADDED // PER_BYTE)
    key_at = key_row[:, None] * KEYS.DIM + channel[None, :]
    value_at = value_row[:, None] * TILE + t[None, :]
    key_high_at, value_high_at = key_at, value_at
    key_shift, value_shift = key_row, value_row
    if KEYS.BITS == 3:
        key_high_at = (TILE // 4 + key_row % (TILE // 8))[:, None] * KEYS.DIM + channel[None, :]
        key_shift = key_row // (TILE // 8)
    if VALUES.BITS == 3:
        value_high_at = (VALUES.DIM // 4 + value_row // 2)[:, None] * TILE + t[None, :]
        value_shift = value_row % 2 * 4

    m = tl.full([COLS], -1e30, tl.float32)
    l = tl.zeros([8, COLS], tl.float32)
    acc = tl.zeros([VALUES.PADDED, COLS], tl.float32)
    coming = 0
    if FORM.MASK_OF_ALL:  # one tile ahead, by hand: the compiler does not fetch single bytes ahead
        coming = _mask_of_all(sequence.sink_length + first * TILE + t, sequence)
    for n in tl.range(first, last, num_stages=FORM.STAGES):
        at = arena + n
        mask_of_all = coming
        if FORM.MASK_OF_ALL:
            coming = _mask_of_all(sequence.sink_length + (n + 1) * TILE + t, sequence)
        if KEYS.DIM == KEYS.PADDED:
            key_word = tl.load(keys.codes + at * KEY_BYTES + key_at)
        else:
            key_word = tl.load(keys.codes + at * KEY_BYTES + key_at, mask=(channel < KEYS.DIM)[None, :], other=0)
        key_channel_scale = _by_channel(keys.channel_scale, at, channel, KEYS)
        key_zero_point = _by_channel(keys.zero_point, at, channel, KEYS)
        key_token_scale = tl.load(keys.token_scale + at * TILE + t).to(tl.float32)
        if VALUES.DIM == VALUES.PADDED:
            value_word = tl.load(values.codes + at * VALUE_BYTES + value_at)
        else:
            value_word = tl.load(
                values.codes + at * VALUE_BYTES + value_at, mask=(value_row < VALUES.DIM // PER_BYTE)[:, None], other=0
            )
        value_channel_scale = _by_channel(values.channel_scale, at, out_channel, VALUES)
        value_token_scale = tl.load(values.token_scale + at * TILE + t).to(tl.float32)
        value_zero_point = tl.load(values.zero_point + at * TILE + t).to(tl.float32)
        key_high, value_high = key_word, value_word
        if KEYS.BITS == 3:
            key_high = tl.load(keys.codes + at * KEY_BYTES + key_high_at, mask=(channel < KEYS.DIM)[None, :], other=0)
        if VALUES.BITS == 3:
            held = (value_row < VALUES.DIM // PER_BYTE)[:, None]
            value_high = tl.load(values.codes + at * VALUE_BYTES + value_high_at, mask=held, other=0)

        x = q * key_channel_scale[:, None]  # [KEYS.PADDED, COLS]
        largest = column_max(tl.abs(x)) + 1e-30
        zero = tl.sum(q * key_zero_point[:, None], 0)
        s = codes_dot(Codes(key_word, key_high, key_shift), x, largest, zero, KEYS)
        s = tl.reshape(tl.permute(tl.reshape(s, (TILE // GROUP, NEAR, 8, COLS)), (0, 2, 1, 3)), (TILE, COLS))
        s = near_first(s, NEAR) * key_token_scale[:, None]
        if FORM.TILE_CAUSAL or FORM.WINDOW or FORM.CAP or sequence.mask is not None or sequence.pad is not None:
            position = sequence.sink_length + n * TILE + t
            s = _biased(s, position, mask_of_all, columns, sequence, FORM.TILE_CAUSAL, FORM)
            if sequence.pad is not None:
                s = tl.where((position >= sequence.pad + sequence.sink_length)[:, None], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 0))
        p = exp2(s - m_new[None, :])
        alpha = exp2(m - m_new)
        m = m_new
        # Summed over a thread's own tokens only; over threads once, behind the loop.
        l = l * alpha[None, :] + tl.sum(tl.sum(tl.reshape(p, (TILE // GROUP, 8, NEAR, COLS)), 2), 0)
        y = p * value_token_scale[:, None]  # [TILE, COLS]
        largest = column_max(y) + 1e-30
        zero = tl.sum(p * value_zero_point[:, None], 0)
        o = codes_dot(Codes(value_word, value_high, value_shift), y, largest, zero, VALUES)
        acc = acc * alpha[None, :] + o * value_channel_scale[:, None]
    total = tl.sum(l, 0)
    column = tl.arange(0, COLS)
    inverse = 1.0 / tl.where(total == 0, 1.0, total)
    acc = unrotated(acc * inverse[None, :], VALUES)
    out_channel = tl.arange(0, 16)[:, None] + (tl.arange(0, VALUES.PADDED // 16) * 16)[None, :]
    _keep(entry.out + (column * VALUES.PADDED)[None, None, :] + out_channel[:, :, None], acc)
    _keep(entry.lse + column, tl.where(total == 0, float("-inf"), m + tl.log2(total)))


@triton.jit
def _position(index, sequence):
    """Where dense tokens are in their row."""
    sink = index if sequence.pad is None else index + sequence.pad
    return tl.where(index < sequence.sink_length, sink, sequence.tail_start + index - sequence.sink_length)


@triton.jit
def _attend_dense(q_ptr, scale, first, last, keys, values, with_run, sequence, columns, entry, FORM: tl.constexpr):
    """Attention over dense tokens ``first .. last`` of one head, and over its padding ``with_run``.

    There may be more ``columns`` than the entry has room for.
    """
    KEYS: tl.constexpr = FORM.KEYS
    VALUES: tl.constexpr = FORM.VALUES
    BLOCK: tl.constexpr = FORM.WORK.BLOCK
    COLS: tl.constexpr = columns.known.shape[0]
    channel, out_channel, x = tl.arange(0, KEYS.PADDED), tl.arange(0, VALUES.PADDED), tl.arange(0, BLOCK)
    q = tl.load(
        q_ptr + columns.offset[None, :] + channel[:, None],
        mask=(channel < KEYS.DIM)[:, None] & columns.known[None, :],
        other=0.0,
    )  # [KEYS.PADDED, COLS]
    m = tl.full([COLS], -1e30, tl.float32)
    l = tl.zeros([COLS], tl.float32)
    acc = tl.zeros([VALUES.PADDED, COLS], tl.float32)
    coming = 0
    if FORM.MASK_OF_ALL:
        coming = _mask_of_all(_position(first + x, sequence), sequence)
    for start in tl.range(first, last, BLOCK, num_stages=FORM.DENSE_STAGES):
        mask_of_all = coming
        if FORM.MASK_OF_ALL:  # of the next block
            coming = _mask_of_all(_position(start + BLOCK + x, sequence), sequence)
        index = start + x
        row = tl.minimum(index, last - 1)  # rather than a mask: what is read twice gets no weight
        key_at = keys.ptr + (row * keys.stride)[:, None] + channel[None, :]
        value_at = values.ptr + (row * values.stride)[None, :] + out_channel[:, None]
        if KEYS.DIM == KEYS.PADDED:
            k = tl.load(key_at)  # [BLOCK, KEYS.PADDED]
        else:
            k = tl.load(key_at, mask=(channel < KEYS.DIM)[None, :], other=0.0)
        if VALUES.DIM == VALUES.PADDED:
            v = tl.load(value_at)  # [VALUES.PADDED, BLOCK]
        else:
            v = tl.load(value_at, mask=(out_channel < VALUES.DIM)[:, None], other=0.0)
        held = index < last
        in_sink = index < sequence.sink_length
        position = _position(index, sequence)
        if sequence.pad is not None:
            held &= (position < sequence.tail_start) | ~in_sink
        s = tl.dot(k, q) * scale
        s = _biased(s, position, mask_of_all, columns, sequence, FORM.CAUSAL, FORM)
        s = tl.where(held[:, None], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 0))
        p = exp2(s - m_new[None, :])
        alpha = exp2(m - m_new)
        m = m_new
        l = l * alpha + tl.sum(p, 0)
        acc = tl.dot(v, p.to(v.dtype), acc * alpha[None, :])
    if sequence.pad is not None:
        if with_run:
            # One token stands for all of the row's padding: its score is computed once, and counts as often as it is
            # seen.
            k = load_channels(keys.run, channel, 1, KEYS).to(tl.float32)
            v = load_channels(values.run, out_channel, 1, VALUES).to(tl.float32)
            plain = tl.sum(q.to(tl.float32) * k[:, None], 0) * scale
            run = tl.minimum(sequence.pad, sequence.tail_start)
            for start in range(0, run, BLOCK):
                position = start + x
                mask_of_all = 0
                if FORM.MASK_OF_ALL:
                    mask_of_all = _mask_of_all(position, sequence)
                s = tl.broadcast_to(plain[None, :], (BLOCK, COLS))
                s = _biased(s, position, mask_of_all, columns, sequence, FORM.CAUSAL, FORM)
                s = tl.where((position < run)[:, None], s, float("-inf"))
                m_new = tl.maximum(m, tl.max(s, 0))
                weight = tl.sum(exp2(s - m_new[None, :]), 0)
                alpha = exp2(m - m_new)
                m = m_new
                l = l * alpha + weight
                acc = acc * alpha[None, :] + v[:, None] * weight[None, :]
    column = tl.arange(0, COLS)
    inverse = 1.0 / tl.where(l == 0, 1.0, l)
    room = column < FORM.WORK.COLS
    _keep(
        entry.out + column[None, :] * VALUES.PADDED + out_channel[:, None], acc * inverse[None, :], mask=room[None, :]
    )
    _keep(entry.lse + column, tl.where(l == 0, float("-inf"), m + tl.log2(l)), mask=room)


@triton.jit
def _entry(part_ptr, lse_start, index, FORM: tl.constexpr):
    """:class:`Entry` number ``index`` of the workspace: outputs first, from ``lse_start`` on the log2-sum-exp2."""
    COLS: tl.constexpr = FORM.WORK.COLS
    return Entry(part_ptr + index * (COLS * FORM.VALUES.PADDED), part_ptr + lse_start + index * COLS)


# fmt: off
@triton.jit(do_not_specialize=[
    "stride_mb", "stride_mh", "stride_mq",
    "count", "capacity", "dense_length", "sink_length", "scale", "window", "cap", "lse_start",
])
def split_kernel(
    query_ptr,
    key_codes_ptr, key_channel_scale_ptr, key_token_scale_ptr, key_zero_point_ptr,
    value_codes_ptr, value_channel_scale_ptr, value_token_scale_ptr, value_zero_point_ptr,
    prescale_ptr, rows_ptr,
    dense_key_ptr, dense_value_ptr,
    pad_ptr, run_key_ptr, run_value_ptr,
    mask_ptr,
    counters_ptr, new_key_ptr, new_value_ptr,
    part_ptr,
    stride_qb, stride_qh, stride_qq,
    stride_kb, stride_kh, stride_kt,
    stride_vb, stride_vh, stride_vt,
    stride_new_kb, stride_new_kh, stride_new_vb, stride_new_vh,
    stride_mb, stride_mh, stride_mq,
    heads, count, capacity, dense_length, sink_length, scale, window, cap, lse_start,
    FORM: tl.constexpr,
):
    # fmt: on
    """One slice of one KV head's tokens, for ``COLS`` of its query heads x query tokens.

    The work is a list, blocks of dense tokens first and then tiles, two of which are as long as ``WEIGHT`` blocks.
    Slices are equally long, so that all programs, which run at once, also end at once. ``count`` and ``dense_length``
    follow from ``counters`` (int64: tokens, tiles, anything, whether there is no room) where that is given.

    Grid
        ``(batch * heads * column blocks, slices)``.
    Reads
        The query, and the slice's dense tokens and tiles, once. A pointer is None where there is nothing of it.
    Writes
        :class:`Entry` of its dense tokens, if it has any, as number ``slice`` (of ``dense_slices``), of its tiles as
        number ``dense_slices + slice - skipped``. The new token, where one is given, behind the dense tokens: only the
        last slice of these does, and reads it.
    Precision
        16-bit digits, exact integer sums, fp32 softmax; fp16 or bf16 products for dense tokens.
    Reference
        ``kvarn_hf/method/attention.py``
    """
    WORK: tl.constexpr = FORM.WORK
    KEYS: tl.constexpr = FORM.KEYS
    VALUES: tl.constexpr = FORM.VALUES
    unit, index = tl.program_id(0), tl.program_id(1)
    slices = tl.num_programs(1)
    if counters_ptr is not None:
        count, dense_length = _lengths(counters_ptr, WORK.TILE)
    BLOCKS: tl.constexpr = (WORK.COLUMNS + WORK.COLS - 1) // WORK.COLS
    block, bh = unit % BLOCKS, unit // BLOCKS
    b, h = bh // heads, bh % heads
    query_ptr += b.to(tl.int64) * stride_qb
    tail_start = sink_length + count * WORK.TILE
    length = tail_start + dense_length - sink_length
    pad = None
    if pad_ptr is not None:
        pad = tl.load(pad_ptr + b).to(tl.int32)
        if counters_ptr is not None:  # sinks move behind the padding with the first tile
            pad = tl.where(count > 0, pad, 0)
    if mask_ptr is not None:
        mask_ptr += b.to(tl.int64) * stride_mb
    sequence = Sequence(pad, sink_length, tail_start, length, mask_ptr, stride_mh, stride_mq, window, cap)
    cut = schedule(count, dense_length, slices, WORK)
    start = index * cut.work // slices
    end = (index + 1) * cut.work // slices
    first, last = tiles_before(start, cut, WORK), tiles_before(end, cut, WORK)
    row = b.to(tl.int64)
    if rows_ptr is not None:
        row = tl.load(rows_ptr + b)
    arena = (row * heads + h) * capacity
    part = unit.to(tl.int64) * (cut.dense_slices + slices - cut.skipped)
    if index < cut.dense_slices:
        WIDE: tl.constexpr = 8 if WORK.COLS < 8 else WORK.COLS  # the least a tensor core takes
        first_dense = blocks_before(start, cut) * WORK.BLOCK
        last_dense = tl.minimum(blocks_before(end, cut) * WORK.BLOCK, dense_length)
        keys_ptr = dense_key_ptr + (b.to(tl.int64) * stride_kb + h * stride_kh)
        values_ptr = dense_value_ptr + (b.to(tl.int64) * stride_vb + h * stride_vh)
        if new_key_ptr is not None:
            if last_dense == dense_length:
                if tl.load(counters_ptr + 3) == 0:  # it found room
                    new_key = new_key_ptr + b.to(tl.int64) * stride_new_kb + h * stride_new_kh
                    new_value = new_value_ptr + b.to(tl.int64) * stride_new_vb + h * stride_new_vh
                    key_at, value_at = (dense_length - 1) * stride_kt, (dense_length - 1) * stride_vt
                    d, e = tl.arange(0, KEYS.PADDED), tl.arange(0, VALUES.PADDED)
                    key, value = load_channels(new_key, d, 1, KEYS), load_channels(new_value, e, 1, VALUES)
                    store_channels(keys_ptr + key_at, d, key, KEYS)
                    store_channels(values_ptr + value_at, e, value, VALUES)
                    tl.debug_barrier()  # this program reads them
        columns = _columns(block * WORK.COLS, h, stride_qh, stride_qq, WIDE, WORK)
        _attend_dense(
            query_ptr,
            scale,
            first_dense,
            last_dense,
            Dense(keys_ptr, stride_kt, None if run_key_ptr is None else run_key_ptr + bh * KEYS.DIM),
            Dense(values_ptr, stride_vt, None if run_value_ptr is None else run_value_ptr + bh * VALUES.DIM),
            index == 0,
            sequence,
            columns,
            _entry(part_ptr, lse_start, part + index, FORM),
            FORM,
        )
    if index >= cut.skipped:
        tiles_part = part + (cut.dense_slices + index - cut.skipped)
        columns = _columns(block * WORK.COLS, h, stride_qh, stride_qq, WORK.COLS, WORK)
        of_head = None if prescale_ptr is None else prescale_ptr + bh * KEYS.DIM
        q = rotated_query(query_ptr, columns, of_head, scale, KEYS)
        if KEYS.BLOCK > 1:
            q *= 2.0 ** (-0.5 * block_bits(KEYS.BLOCK))
        _attend_tiles(
            q,
            first,
            last,
            arena,
            Packed(key_codes_ptr, key_channel_scale_ptr, key_token_scale_ptr, key_zero_point_ptr),
            Packed(value_codes_ptr, value_channel_scale_ptr, value_token_scale_ptr, value_zero_point_ptr),
            sequence,
            columns,
            _entry(part_ptr, lse_start, tiles_part, FORM),
            FORM,
        )


# fmt: off
@triton.jit(do_not_specialize=["entries", "slices", "sink_length", "lse_start"])
def combine_kernel(
    part_ptr, sinks_ptr, out_ptr, counters_ptr,
    heads, entries, slices, sink_length, lse_start,
    WORK: tl.constexpr,
    VALUES: tl.constexpr,
    ENTRIES: tl.constexpr,
    TAKEN: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    # fmt: on
    """``out = (sum_s w_s o_s) / (sum_s w_s + exp(sink))``, with ``w_s = exp(lse_s)``.

    Grid
        ``(batch * heads, blocks of TAKEN columns, blocks of CHANNELS channels)``; TAKEN divides COLS.
    Reads
        The ``entries`` (at most ENTRIES, a power of two) of :func:`split_kernel` in the workspace, and ``counters``
        where given: then ``entries`` follows from them. sinks ``[query heads]``, or None.
    Writes
        out ``[batch, QUERIES, query heads, VALUES.DIM]``; NaN if ``counters`` say that a token found no room.
    Reference
        ``kvarn_hf/method/attention.py``
    """
    if counters_ptr is not None:
        count, dense_length = _lengths(counters_ptr, WORK.TILE)
        cut = schedule(count, dense_length, slices, WORK)
        entries = cut.dense_slices + slices - cut.skipped
    bh, first = tl.program_id(0), tl.program_id(1) * TAKEN
    unit = bh * ((WORK.COLUMNS + WORK.COLS - 1) // WORK.COLS) + first // WORK.COLS
    columns = _columns(first, bh % heads, 0, 0, TAKEN, WORK)
    channel, entry = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, ENTRIES)
    at = (unit.to(tl.int64) * entries + entry)[:, None] * WORK.COLS + (first % WORK.COLS + tl.arange(0, TAKEN))[None, :]
    held = (entry < entries)[:, None]
    # Both loads before anything waits for one.
    o = tl.load(part_ptr + at[:, :, None] * VALUES.PADDED + channel[None, None, :], mask=held[:, :, None], other=0.0)
    lse = tl.load(part_ptr + lse_start + at, mask=held, other=float("-inf"))
    m = tl.max(lse, 0)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + columns.head, mask=columns.known, other=0.0).to(tl.float32) * LOG2E
        m = tl.maximum(m, sink)
    m = tl.where(m == float("-inf"), 0.0, m)  # a query that sees nothing gets zeros
    weight = tl.exp2(lse - m[None, :])
    total = tl.sum(weight, 0)
    if sinks_ptr is not None:
        total += tl.exp2(sink - m)
    out = tl.sum(o * weight[:, :, None], 0) / tl.where(total == 0, 1.0, total)[:, None]
    if counters_ptr is not None:
        out = tl.where(tl.load(counters_ptr + 3) != 0, float("nan"), out)
    b, query_heads = bh // heads, heads * (WORK.COLUMNS // WORK.QUERIES)
    at = ((b * WORK.QUERIES + columns.token) * query_heads + columns.head).to(tl.int64) * VALUES.DIM
    known = columns.known[:, None] & (channel < VALUES.DIM)[None, :]
    tl.store(out_ptr + at[:, None] + channel[None, :], out.to(out_ptr.dtype.element_ty), mask=known)
