"""The two kernels of the decode attention; :mod:`kvarn_kernels.decode_attention` has the method and the launches."""

from __future__ import annotations

import triton
import triton.language as tl

from kvarn_kernels.int8_dot import codes_dot, column_max, exp2, near_first, to_digits


@triton.jit
def _cut(count, dense_length, slices, BLOCK: tl.constexpr, WEIGHT: tl.constexpr):
    """The list of work, blocks of dense tokens first and then tiles, and how ``slices`` share it.

    A block counts 2, a tile ``WEIGHT``, and half of that turning to the tiles, which is a start of its own. A slice
    that begins from ``dense_end`` on has no blocks: at most half a tile's worth is left, which the one before takes.

    Returns blocks, dense_end, tiles_start, the list's length, how many slices (the first ones) have blocks, and how
    many have no tiles.
    """
    blocks = tl.maximum(1, tl.cdiv(dense_length, BLOCK))
    dense_end = tl.maximum(2 * blocks - WEIGHT // 2, 1)
    tiles_start = 2 * blocks + WEIGHT // 2
    work = tiles_start + count * WEIGHT
    dense_slices = tl.minimum(slices, tl.cdiv(dense_end * slices, work))
    skipped = tl.minimum(slices, tl.cdiv((tiles_start + (WEIGHT + 1) // 2) * slices, work) - 1)
    return blocks, dense_end, tiles_start, work, dense_slices, skipped


@triton.jit
def _blocks_before(at, blocks, dense_end):
    """How many blocks come before a place in the list."""
    return tl.where(at < dense_end, (at + 1) // 2, blocks)


@triton.jit
def _tiles_before(at, tiles_start, WEIGHT: tl.constexpr):
    """How many tiles come before a place in the list, to the nearest."""
    return tl.maximum(at - tiles_start + WEIGHT // 2, 0) // WEIGHT


@triton.jit
def _lengths(progress_ptr, sink_length, TILE: tl.constexpr):
    """Tiles and dense tokens, as the device knows them."""
    count = tl.load(progress_ptr + 1).to(tl.int32)
    return count, tl.load(progress_ptr).to(tl.int32) - count * TILE


@triton.jit
def _queries(first, h, COLS: tl.constexpr, COLUMNS: tl.constexpr, QUERIES: tl.constexpr):
    """Which query head and which of the new tokens each column is, and whether there is one."""
    column = first + tl.arange(0, COLS)
    return column < COLUMNS, h * (COLUMNS // QUERIES) + column // QUERIES, column % QUERIES


@triton.jit
def _mask_of_all(mask_ptr, position, length):
    """What a mask that is the same for all columns says of tokens."""
    return tl.load(mask_ptr + position, mask=position < length, other=0)


@triton.jit
def _bias(
    score,
    position,
    mask_of_all,
    column_ok,
    head,
    token,
    length,
    mask_ptr,
    stride_m_h,
    stride_m_q,
    window,
    cap,
    QUERIES: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    MASK: tl.constexpr,
):
    """Soft-capped scores (base 2) [TOKENS, COLS], -inf where a query may not see a token. position [TOKENS];
    mask_of_all [TOKENS] if MASK > 2."""
    if CAP:  # cap tanh(x / cap), by an exponential that cannot overflow
        small = tl.exp2(-2 * 1.4426950408889634 * tl.abs(score) / cap)
        size = cap * (1 - small) / (1 + small)
        score = tl.where(score < 0, -size, size)
    query_position = length - QUERIES + token
    if CAUSAL:
        score = tl.where(position[:, None] <= query_position[None, :], score, float("-inf"))
    if WINDOW:
        score = tl.where(position[:, None] > (query_position - window)[None, :], score, float("-inf"))
    if MASK > 2:
        if MASK == 3:
            score = tl.where((mask_of_all != 0)[:, None], score, float("-inf"))
        else:
            score += (mask_of_all.to(tl.float32) * 1.4426950408889634)[:, None]
    elif MASK > 0:
        where = mask_ptr + (head * stride_m_h + token * stride_m_q)[None, :] + position[:, None]
        known = column_ok[None, :] & (position < length)[:, None]
        if MASK == 1:
            score = tl.where(tl.load(where, mask=known, other=0) != 0, score, float("-inf"))
        else:
            score += tl.load(where, mask=known, other=0.0).to(tl.float32) * 1.4426950408889634
    return score


@triton.jit
def _butterflies(x, OUTER: tl.constexpr, BITS: tl.constexpr, COLS: tl.constexpr):
    """Unscaled Walsh-Hadamard transform over the low ``BITS`` bits of the middle index of x [16, OUTER, COLS]."""
    for bit in tl.static_range(BITS):
        x = tl.reshape(x, (16, OUTER >> (bit + 1), 2, 1 << bit, COLS))
        a, b = tl.split(tl.permute(x, (0, 1, 3, 4, 2)))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 4, 2, 3)), (16, OUTER, COLS))
    return x


@triton.jit
def _rotated_query(
    q_ptr,
    offset,
    column_ok,
    prescale_ptr,
    scale,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_BITS: tl.constexpr,
    COLS: tl.constexpr,
    PRESCALE: tl.constexpr,
    SPLIT_DTYPE: tl.constexpr,
):
    """``scale H (q / prescale)`` as [DIM_PAD, COLS] fp32, four neighbouring channels in neighbouring registers.

    Channel bits 0, 2, 3, 4 are transformed by one 16 x 16 matrix product and the others by butterflies: the product
    leaves the query in the layout of an accumulator, which is that of the scores, so that nothing in the loop changes
    layout.
    """
    OUTER: tl.constexpr = DIM_PAD // 16
    row = tl.arange(0, 16)  # bit 3: channel bit 0; bits 0 to 2: channel bits 2 to 4
    outer = tl.arange(0, OUTER)  # bit 0: channel bit 1; above: channel bits 5 and up
    channel = ((row & 7) * 4 + (row >> 3))[:, None] + ((outer & 1) * 2 + (outer >> 1) * 32)[None, :]
    inside = channel < DIM
    q = tl.load(
        q_ptr + offset[None, None, :] + channel[:, :, None],
        mask=inside[:, :, None] & column_ok[None, None, :],
        other=0.0,
    ).to(tl.float32)
    if PRESCALE:
        q /= tl.load(prescale_ptr + channel, mask=inside, other=1.0).to(tl.float32)[:, :, None]
    # The channels are multiples of 16, and so is the block.
    bits: tl.constexpr = 0 if BLOCK_BITS == 0 else (11 if BLOCK_BITS == 4 else 15)
    butterflies: tl.constexpr = 0 if BLOCK_BITS == 0 else (1 if BLOCK_BITS < 6 else BLOCK_BITS - 4)
    common = row[:, None] & row[None, :] & bits
    odd = (common ^ (common >> 1) ^ (common >> 2) ^ (common >> 3)) & 1
    matrix = tl.where(((row[:, None] ^ row[None, :]) & (15 - bits)) == 0, 1.0 - 2.0 * odd.to(tl.float32), 0.0)
    high = q.to(SPLIT_DTYPE)
    low = (q - high.to(tl.float32)).to(SPLIT_DTYPE)
    parts = tl.reshape(tl.join(high, low), (16, OUTER * COLS * 2))
    rotated = tl.reshape(tl.dot(matrix.to(SPLIT_DTYPE), parts), (16, OUTER, COLS, 2))
    high, low = tl.split(rotated)
    q = _butterflies((high + low) * scale, OUTER, butterflies, COLS)
    q = tl.reshape(q, (2, 8, OUTER // 2, 2, COLS))  # [channel bit 0, bits 2 to 4, bits 5 and up, bit 1, column]
    return near_first(tl.reshape(tl.permute(q, (2, 1, 3, 0, 4)), (DIM_PAD, COLS)), DIM_PAD, 4, COLS)


@triton.jit
def _unrotated(x, DIM_PAD: tl.constexpr, BLOCK_BITS: tl.constexpr, COLS: tl.constexpr, SPLIT_DTYPE: tl.constexpr):
    """``H x`` of x [DIM_PAD, COLS], as [16, DIM_PAD // 16, COLS]: low four channel bits first.

    These four are transformed by a 16 x 16 matrix product, the others by butterflies between registers of a thread.
    """
    OUTER: tl.constexpr = DIM_PAD // 16
    x = tl.permute(tl.reshape(x, (OUTER, 16, COLS)), (1, 0, 2))
    if BLOCK_BITS > 0:
        row = tl.arange(0, 16)
        common = row[:, None] & row[None, :]
        odd = (common ^ (common >> 1) ^ (common >> 2) ^ (common >> 3)) & 1
        matrix = (1.0 - 2.0 * odd.to(tl.float32)).to(SPLIT_DTYPE)
        high = x.to(SPLIT_DTYPE)
        low = (x - high.to(tl.float32)).to(SPLIT_DTYPE)
        parts = tl.reshape(tl.join(high, low), (16, OUTER * COLS * 2))
        high, low = tl.split(tl.reshape(tl.dot(matrix, parts), (16, OUTER, COLS, 2)))
        x = _butterflies(high + low, OUTER, BLOCK_BITS - 4, COLS) * 2.0 ** (-0.5 * BLOCK_BITS)
    return x


@triton.jit
def _keep(pointer, x, mask=None):
    """Store what :func:`combine_kernel` reads next.

    It is to stay in the L2 cache: what streams through would push it out, and the kernel would take 2 % longer.
    """
    tl.store(pointer, x, mask=mask, eviction_policy="evict_last")


@triton.jit
def _attend_tiles(
    q,
    first,
    last,
    tile,
    pad,
    sink_length,
    column_ok,
    head,
    token,
    length,
    mask_ptr,
    stride_m_h,
    stride_m_q,
    window,
    cap,
    kc_ptr,
    kcs_ptr,
    kts_ptr,
    kzp_ptr,
    vc_ptr,
    vcs_ptr,
    vts_ptr,
    vzp_ptr,
    o_ptr,
    lse_ptr,
    QUERIES: tl.constexpr,
    COLS: tl.constexpr,
    TILE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_BLOCK_BITS: tl.constexpr,
    SPLIT_DTYPE: tl.constexpr,
    PADDED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    MASK: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """Attention over tiles ``first .. last`` of one head: o [COLS, VALUE_PAD], un-rotated, and its log2-sum-exp2."""
    KEY_ROWS: tl.constexpr = TILE if KEY_BITS == 8 else (TILE // 2 if KEY_BITS == 4 else TILE // 4)
    PER_BYTE: tl.constexpr = 1 if VALUE_BITS == 8 else (2 if VALUE_BITS == 4 else 4)
    VALUE_ROWS: tl.constexpr = VALUE_PAD // PER_BYTE
    # Key rows are loaded in an order that gives each thread neighbouring tokens: four probabilities make one word of
    # digits.
    GROUP: tl.constexpr = 32 if KEY_ROWS >= 32 else 16
    NEAR: tl.constexpr = GROUP // 8
    slot = tl.arange(0, KEY_ROWS)
    key_row = slot // GROUP * GROUP + slot % 8 * NEAR + slot % GROUP // 8
    channel, t = tl.arange(0, KEY_PAD), tl.arange(0, TILE)
    out_channel, value_row = tl.arange(0, VALUE_PAD), tl.arange(0, VALUE_ROWS)
    key_at = key_row[:, None] * KEY_DIM + channel[None, :]
    value_at = value_row[:, None] * TILE + t[None, :]
    key_high_at, value_high_at = key_at, value_at
    key_shift, value_shift = key_row, value_row
    if KEY_BITS == 3:
        key_high_at = (TILE // 4 + key_row % (TILE // 8))[:, None] * KEY_DIM + channel[None, :]
        key_shift = key_row // (TILE // 8)
    if VALUE_BITS == 3:
        value_high_at = (VALUE_DIM // 4 + value_row // 2)[:, None] * TILE + t[None, :]
        value_shift = value_row % 2 * 4
    KEY_BYTES: tl.constexpr = TILE * KEY_DIM * KEY_BITS // 8
    VALUE_BYTES: tl.constexpr = TILE * VALUE_DIM * VALUE_BITS // 8

    m = tl.full([COLS], -1e30, tl.float32)
    l = tl.zeros([8, COLS], tl.float32)
    acc = tl.zeros([VALUE_PAD, COLS], tl.float32)
    coming = 0
    if MASK > 2:  # one tile ahead, by hand: the compiler does not fetch single bytes ahead
        coming = _mask_of_all(mask_ptr, sink_length + first * TILE + t, length)
    for n in tl.range(first, last, num_stages=STAGES):
        at = tile + n  # int64
        mask_of_all = coming
        if MASK > 2:
            coming = _mask_of_all(mask_ptr, sink_length + (n + 1) * TILE + t, length)
        if KEY_DIM == KEY_PAD:
            key_word = tl.load(kc_ptr + at * KEY_BYTES + key_at)
            kcs = tl.load(kcs_ptr + at * KEY_DIM + channel).to(tl.float32)
            kzp = tl.load(kzp_ptr + at * KEY_DIM + channel).to(tl.float32)
        else:
            key_word = tl.load(kc_ptr + at * KEY_BYTES + key_at, mask=(channel < KEY_DIM)[None, :], other=0)
            kcs = tl.load(kcs_ptr + at * KEY_DIM + channel, mask=channel < KEY_DIM, other=0.0).to(tl.float32)
            kzp = tl.load(kzp_ptr + at * KEY_DIM + channel, mask=channel < KEY_DIM, other=0.0).to(tl.float32)
        kts = tl.load(kts_ptr + at * TILE + t).to(tl.float32)
        if VALUE_DIM == VALUE_PAD:
            value_word = tl.load(vc_ptr + at * VALUE_BYTES + value_at)
            vcs = tl.load(vcs_ptr + at * VALUE_DIM + out_channel).to(tl.float32)
        else:
            value_ok = (value_row < VALUE_DIM // PER_BYTE)[:, None]
            value_word = tl.load(vc_ptr + at * VALUE_BYTES + value_at, mask=value_ok, other=0)
            vcs = tl.load(vcs_ptr + at * VALUE_DIM + out_channel, mask=out_channel < VALUE_DIM, other=0.0).to(
                tl.float32
            )
        vts = tl.load(vts_ptr + at * TILE + t).to(tl.float32)
        vzp = tl.load(vzp_ptr + at * TILE + t).to(tl.float32)
        key_high, value_high = key_word, value_word
        if KEY_BITS == 3:
            key_high = tl.load(kc_ptr + at * KEY_BYTES + key_high_at, mask=(channel < KEY_DIM)[None, :], other=0)
        if VALUE_BITS == 3:
            value_ok = (value_row < VALUE_DIM // PER_BYTE)[:, None]
            value_high = tl.load(vc_ptr + at * VALUE_BYTES + value_high_at, mask=value_ok, other=0)

        x = q * kcs[:, None]  # [KEY_PAD, COLS]
        largest = column_max(tl.abs(x), ASM) + 1e-30
        zero = tl.sum(q * kzp[:, None], 0)
        digits = to_digits(x, 32512.0 / largest, KEY_PAD, COLS, ASM)
        s = codes_dot(
            key_word,
            key_high,
            key_shift,
            digits,
            largest * (1.0 / 32512.0),
            zero,
            tl.sum(x, 0),
            KEY_BITS,
            True,
            KEY_ROWS,
            COLS,
            ASM,
        )
        s = tl.reshape(tl.permute(tl.reshape(s, (TILE // GROUP, NEAR, 8, COLS)), (0, 2, 1, 3)), (TILE, COLS))
        s = near_first(s, TILE, NEAR, COLS)
        s *= kts[:, None]
        if PADDED or CAUSAL or WINDOW or CAP or MASK > 0:
            position = sink_length + n * TILE + t
            s = _bias(
                s,
                position,
                mask_of_all,
                column_ok,
                head,
                token,
                length,
                mask_ptr,
                stride_m_h,
                stride_m_q,
                window,
                cap,
                QUERIES,
                CAUSAL,
                WINDOW,
                CAP,
                MASK,
            )
            if PADDED:
                s = tl.where((position >= pad + sink_length)[:, None], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 0))
        p = exp2(s - m_new[None, :], ASM)
        alpha = exp2(m - m_new, ASM)
        m = m_new
        # Summed over a thread's own tokens only; over threads once, behind the loop.
        l = l * alpha[None, :] + tl.sum(tl.sum(tl.reshape(p, (TILE // GROUP, 8, NEAR, COLS)), 2), 0)
        y = p * vts[:, None]  # [TILE, COLS]
        largest = column_max(y, ASM) + 1e-30
        zero = tl.sum(p * vzp[:, None], 0)
        digits = to_digits(y, 32512.0 / largest, TILE, COLS, ASM)
        o = codes_dot(
            value_word,
            value_high,
            value_shift,
            digits,
            largest * (1.0 / 32512.0),
            zero,
            tl.sum(y, 0),
            VALUE_BITS,
            False,
            VALUE_ROWS,
            COLS,
            ASM,
        )
        acc = acc * alpha[None, :] + o * vcs[:, None]
    total = tl.sum(l, 0)
    column = tl.arange(0, COLS)
    inverse = 1.0 / tl.where(total == 0, 1.0, total)
    acc = _unrotated(acc * inverse[None, :], VALUE_PAD, VALUE_BLOCK_BITS, COLS, SPLIT_DTYPE)
    out_channel = tl.arange(0, 16)[:, None] + (tl.arange(0, VALUE_PAD // 16) * 16)[None, :]
    _keep(o_ptr + (column * VALUE_PAD)[None, None, :] + out_channel[:, :, None], acc)
    _keep(lse_ptr + column, tl.where(total == 0, float("-inf"), m + tl.log2(total)))


@triton.jit
def _position(index, pad, tail_start, sink_length):
    """Where dense tokens are in their row."""
    return tl.where(index < sink_length, index + pad, tail_start + index - sink_length)


@triton.jit
def _write_token(
    dk_ptr,
    dv_ptr,
    new_k_ptr,
    new_v_ptr,
    index_k,
    index_v,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
):
    """Store one new key and value, before this program reads them."""
    channel, out_channel = tl.arange(0, KEY_PAD), tl.arange(0, VALUE_PAD)
    k = tl.load(new_k_ptr + channel, mask=channel < KEY_DIM, other=0.0)
    v = tl.load(new_v_ptr + out_channel, mask=out_channel < VALUE_DIM, other=0.0)
    tl.store(dk_ptr + index_k + channel, k, mask=channel < KEY_DIM)
    tl.store(dv_ptr + index_v + out_channel, v, mask=out_channel < VALUE_DIM)
    tl.debug_barrier()


@triton.jit
def _attend_dense(
    q_ptr,
    q_offset,
    scale,
    first,
    last,
    pad,
    run_k_ptr,
    run_v_ptr,
    dk_ptr,
    dv_ptr,
    stride_dk_t,
    stride_dv_t,
    with_run,
    tail_start,
    sink_length,
    column_ok,
    head,
    token,
    length,
    mask_ptr,
    stride_m_h,
    stride_m_q,
    window,
    cap,
    o_ptr,
    lse_ptr,
    QUERIES: tl.constexpr,
    COLS: tl.constexpr,
    STORED: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    PADDED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    MASK: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """Attention over dense tokens ``first .. last`` of one head, in the model's own frame."""
    channel, out_channel, x = tl.arange(0, KEY_PAD), tl.arange(0, VALUE_PAD), tl.arange(0, BLOCK)
    q = tl.load(
        q_ptr + q_offset[None, :] + channel[:, None], mask=(channel < KEY_DIM)[:, None] & column_ok[None, :], other=0.0
    )  # [KEY_PAD, COLS]
    m = tl.full([COLS], -1e30, tl.float32)
    l = tl.zeros([COLS], tl.float32)
    acc = tl.zeros([VALUE_PAD, COLS], tl.float32)
    coming = 0
    if MASK > 2:
        position = _position(first + x, pad, tail_start, sink_length)
        coming = _mask_of_all(mask_ptr, position, length)
    for start in tl.range(first, last, BLOCK, num_stages=STAGES):
        mask_of_all = coming
        if MASK > 2:  # of the next block
            position = _position(start + BLOCK + x, pad, tail_start, sink_length)
            coming = _mask_of_all(mask_ptr, position, length)
        index = start + x
        row = tl.minimum(index, last - 1)  # rather than a mask: what is read twice gets no weight
        key_at = dk_ptr + (row * stride_dk_t)[:, None] + channel[None, :]
        value_at = dv_ptr + (row * stride_dv_t)[None, :] + out_channel[:, None]
        if KEY_DIM == KEY_PAD:
            k = tl.load(key_at)  # [BLOCK, KEY_PAD]
        else:
            k = tl.load(key_at, mask=(channel < KEY_DIM)[None, :], other=0.0)
        if VALUE_DIM == VALUE_PAD:
            v = tl.load(value_at)  # [VALUE_PAD, BLOCK]
        else:
            v = tl.load(value_at, mask=(out_channel < VALUE_DIM)[:, None], other=0.0)
        held = index < last
        in_sink = index < sink_length
        position = _position(index, pad, tail_start, sink_length)
        if PADDED:
            held &= (position < tail_start) | ~in_sink
        s = tl.dot(k, q) * scale
        s = _bias(
            s,
            position,
            mask_of_all,
            column_ok,
            head,
            token,
            length,
            mask_ptr,
            stride_m_h,
            stride_m_q,
            window,
            cap,
            QUERIES,
            CAUSAL,
            WINDOW,
            CAP,
            MASK,
        )
        s = tl.where(held[:, None], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 0))
        p = exp2(s - m_new[None, :], ASM)
        alpha = exp2(m - m_new, ASM)
        m = m_new
        l = l * alpha + tl.sum(p, 0)
        acc = tl.dot(v, p.to(v.dtype), acc * alpha[None, :])
    if PADDED:
        if with_run:
            # One token stands for all of the row's padding: its score is computed once, and counts as often as it is
            # seen.
            k = tl.load(run_k_ptr + channel, mask=channel < KEY_DIM, other=0.0).to(tl.float32)
            v = tl.load(run_v_ptr + out_channel, mask=out_channel < VALUE_DIM, other=0.0).to(tl.float32)
            plain = tl.sum(q.to(tl.float32) * k[:, None], 0) * scale
            run = tl.minimum(pad, tail_start)
            for start in range(0, run, BLOCK):
                position = start + x
                mask_of_all = 0
                if MASK > 2:
                    mask_of_all = _mask_of_all(mask_ptr, position, length)
                s = _bias(
                    tl.broadcast_to(plain[None, :], (BLOCK, COLS)),
                    position,
                    mask_of_all,
                    column_ok,
                    head,
                    token,
                    length,
                    mask_ptr,
                    stride_m_h,
                    stride_m_q,
                    window,
                    cap,
                    QUERIES,
                    CAUSAL,
                    WINDOW,
                    CAP,
                    MASK,
                )
                s = tl.where((position < run)[:, None], s, float("-inf"))
                m_new = tl.maximum(m, tl.max(s, 0))
                weight = tl.sum(exp2(s - m_new[None, :], ASM), 0)
                alpha = exp2(m - m_new, ASM)
                m = m_new
                l = l * alpha + weight
                acc = acc * alpha[None, :] + v[:, None] * weight[None, :]
    column = tl.arange(0, COLS)
    inverse = 1.0 / tl.where(l == 0, 1.0, l)
    stored = column < STORED
    _keep(o_ptr + column[None, :] * VALUE_PAD + out_channel[:, None], acc * inverse[None, :], mask=stored[None, :])
    _keep(lse_ptr + column, tl.where(l == 0, float("-inf"), m + tl.log2(l)), mask=stored)


@triton.jit(
    do_not_specialize=[
        "count",
        "capacity",
        "dense_length",
        "sink_length",
        "scale",
        "window",
        "cap",
        "lse_start",
        "stride_m_b",
        "stride_m_h",
        "stride_m_q",
    ]
)
def split_kernel(
    q_ptr,
    kc_ptr,
    kcs_ptr,
    kts_ptr,
    kzp_ptr,
    vc_ptr,
    vcs_ptr,
    vts_ptr,
    vzp_ptr,
    prescale_ptr,
    rows_ptr,
    dk_ptr,
    dv_ptr,
    pad_ptr,
    run_k_ptr,
    run_v_ptr,
    mask_ptr,
    progress_ptr,
    new_k_ptr,
    new_v_ptr,
    part_ptr,
    stride_q_b,
    stride_q_h,
    stride_q_q,
    stride_dk_b,
    stride_dk_h,
    stride_dk_t,
    stride_dv_b,
    stride_dv_h,
    stride_dv_t,
    stride_nk_b,
    stride_nk_h,
    stride_nv_b,
    stride_nv_h,
    stride_m_b,
    stride_m_h,
    stride_m_q,
    heads,
    count,
    capacity,
    dense_length,
    sink_length,
    scale,
    window,
    cap,
    lse_start,
    QUERIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    COLS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHT: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    KEY_BLOCK_BITS: tl.constexpr,
    VALUE_BLOCK_BITS: tl.constexpr,
    PRESCALE: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
    CAUSAL: tl.constexpr,
    TILE_CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    MASK: tl.constexpr,
    SPLIT_DTYPE: tl.constexpr,
    STAGES: tl.constexpr,
    DENSE_STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """One slice of one KV head's tokens, for ``COLS`` of its query heads x query tokens.

    The work is a list, blocks of dense tokens first and then tiles, two of which are as long as ``WEIGHT`` blocks.
    Slices are equally long, so that all programs, which run at once, also end at once. ``count`` and ``dense_length``
    follow from ``progress`` (int64: tokens, tiles) where that is given.

    Grid: (batch * heads * column blocks, slices).
    Reads: the query, and the slice's dense tokens and tiles, once.
    Writes: output [COLS, VALUE_PAD] and log2-sum-exp2 [COLS] into the workspace, fp32: of its dense tokens, if it has
        any, as entry ``slice`` (of ``dense_slices``), of its tiles as entry ``dense_slices + slice - skipped``. The
        new token, where one is given, behind the dense tokens: only the last slice of these does, and reads it.
    Precision: 16-bit digits, exact integer sums, fp32 softmax; fp16 or bf16 products for dense tokens.
    Reference: kvarn_hf/reference/attention.py
    """
    unit, index = tl.program_id(0), tl.program_id(1)
    slices = tl.num_programs(1)
    if progress_ptr is not None:
        count, dense_length = _lengths(progress_ptr, sink_length, TILE)
    BLOCKS: tl.constexpr = (COLUMNS + COLS - 1) // COLS
    block, bh = unit % BLOCKS, unit // BLOCKS
    b, h = bh // heads, bh % heads
    q_ptr += b.to(tl.int64) * stride_q_b
    tail_start = sink_length + count * TILE
    length = tail_start + dense_length - sink_length
    pad = 0
    if PADDED:
        pad = tl.load(pad_ptr + b).to(tl.int32)
        if progress_ptr is not None:  # sinks move behind the padding with the first tile
            pad = tl.where(count > 0, pad, 0)
    if MASK > 0:
        mask_ptr += b.to(tl.int64) * stride_m_b
    blocks, dense_end, tiles_start, work, dense_slices, skipped = _cut(count, dense_length, slices, BLOCK, WEIGHT)
    start = index * work // slices
    end = (index + 1) * work // slices
    first, last = _tiles_before(start, tiles_start, WEIGHT), _tiles_before(end, tiles_start, WEIGHT)
    row = b.to(tl.int64)
    if ROWS:
        row = tl.load(rows_ptr + b)
    tile = (row * heads + h) * capacity
    part = unit.to(tl.int64) * (dense_slices + slices - skipped)
    if index < dense_slices:
        WIDE: tl.constexpr = 8 if COLS < 8 else COLS  # the least a tensor core takes
        first_dense = _blocks_before(start, blocks, dense_end) * BLOCK
        last_dense = tl.minimum(_blocks_before(end, blocks, dense_end) * BLOCK, dense_length)
        dk_ptr += b.to(tl.int64) * stride_dk_b + h * stride_dk_h
        dv_ptr += b.to(tl.int64) * stride_dv_b + h * stride_dv_h
        if new_k_ptr is not None:
            if last_dense == dense_length:
                if tl.load(progress_ptr + 3) == 0:  # it found room
                    _write_token(
                        dk_ptr,
                        dv_ptr,
                        new_k_ptr + b.to(tl.int64) * stride_nk_b + h * stride_nk_h,
                        new_v_ptr + b.to(tl.int64) * stride_nv_b + h * stride_nv_h,
                        (dense_length - 1) * stride_dk_t,
                        (dense_length - 1) * stride_dv_t,
                        KEY_DIM,
                        KEY_PAD,
                        VALUE_DIM,
                        VALUE_PAD,
                    )
        dense_ok, dense_head, dense_token = _queries(block * COLS, h, WIDE, COLUMNS, QUERIES)
        _attend_dense(
            q_ptr,
            dense_head * stride_q_h + dense_token * stride_q_q,
            scale,
            first_dense,
            last_dense,
            pad,
            run_k_ptr + bh * KEY_DIM if PADDED else run_k_ptr,
            run_v_ptr + bh * VALUE_DIM if PADDED else run_v_ptr,
            dk_ptr,
            dv_ptr,
            stride_dk_t,
            stride_dv_t,
            index == 0,
            tail_start,
            sink_length,
            dense_ok,
            dense_head,
            dense_token,
            length,
            mask_ptr,
            stride_m_h,
            stride_m_q,
            window,
            cap,
            part_ptr + (part + index) * (COLS * VALUE_PAD),
            part_ptr + lse_start + (part + index) * COLS,
            QUERIES,
            WIDE,
            COLS,
            BLOCK,
            KEY_DIM,
            KEY_PAD,
            VALUE_DIM,
            VALUE_PAD,
            PADDED,
            CAUSAL,
            WINDOW,
            CAP,
            MASK,
            DENSE_STAGES,
            ASM,
        )
    if index >= skipped:
        part += dense_slices + index - skipped
        column_ok, head, token = _queries(block * COLS, h, COLS, COLUMNS, QUERIES)
        q = _rotated_query(
            q_ptr,
            head * stride_q_h + token * stride_q_q,
            column_ok,
            prescale_ptr + bh * KEY_DIM if PRESCALE else prescale_ptr,
            scale,
            KEY_DIM,
            KEY_PAD,
            KEY_BLOCK_BITS,
            COLS,
            PRESCALE,
            SPLIT_DTYPE,
        )
        if KEY_BLOCK_BITS > 0:
            q *= 2.0 ** (-0.5 * KEY_BLOCK_BITS)
        _attend_tiles(
            q,
            first,
            last,
            tile,
            pad,
            sink_length,
            column_ok,
            head,
            token,
            length,
            mask_ptr,
            stride_m_h,
            stride_m_q,
            window,
            cap,
            kc_ptr,
            kcs_ptr,
            kts_ptr,
            kzp_ptr,
            vc_ptr,
            vcs_ptr,
            vts_ptr,
            vzp_ptr,
            part_ptr + part * (COLS * VALUE_PAD),
            part_ptr + lse_start + part * COLS,
            QUERIES,
            COLS,
            TILE,
            KEY_DIM,
            KEY_PAD,
            VALUE_DIM,
            VALUE_PAD,
            KEY_BITS,
            VALUE_BITS,
            VALUE_BLOCK_BITS,
            SPLIT_DTYPE,
            PADDED,
            TILE_CAUSAL,
            WINDOW,
            CAP,
            MASK,
            STAGES,
            ASM,
        )


@triton.jit(do_not_specialize=["entries", "slices", "sink_length", "lse_start"])
def combine_kernel(
    part_ptr,
    sinks_ptr,
    out_ptr,
    progress_ptr,
    heads,
    entries,
    slices,
    sink_length,
    lse_start,
    QUERIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    COLS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHT: tl.constexpr,
    ENTRIES_PAD: tl.constexpr,
    TAKEN: tl.constexpr,
    CHANNELS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """``out = (sum_s w_s o_s) / (sum_s w_s + exp(sink))``, with ``w_s = exp(lse_s)``.

    Grid: (batch * heads, blocks of TAKEN columns, blocks of CHANNELS channels); columns are query heads per KV head x
        query tokens, and TAKEN divides COLS.
    Reads: the workspace of :func:`split_kernel`, and ``progress`` where given: then ``entries`` follows from it.
    Writes: out [batch, QUERIES, query heads, VALUE_DIM]; NaN if ``progress`` says that a token found no room.
    Reference: kvarn_hf/reference/attention.py
    """
    if progress_ptr is not None:
        count, dense_length = _lengths(progress_ptr, sink_length, TILE)
        _, _, _, _, dense_slices, skipped = _cut(count, dense_length, slices, BLOCK, WEIGHT)
        entries = dense_slices + slices - skipped
    bh, first = tl.program_id(0), tl.program_id(1) * TAKEN
    unit = bh * ((COLUMNS + COLS - 1) // COLS) + first // COLS
    column_ok, head, token = _queries(first, bh % heads, TAKEN, COLUMNS, QUERIES)
    channel, entry = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, ENTRIES_PAD)
    at = (unit.to(tl.int64) * entries + entry)[:, None] * COLS + (first % COLS + tl.arange(0, TAKEN))[None, :]
    held = (entry < entries)[:, None]
    # Both loads before anything waits for one.
    o = tl.load(part_ptr + at[:, :, None] * VALUE_PAD + channel[None, None, :], mask=held[:, :, None], other=0.0)
    lse = tl.load(part_ptr + lse_start + at, mask=held, other=float("-inf"))
    m = tl.max(lse, 0)
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=column_ok, other=0.0).to(tl.float32) * 1.4426950408889634
        m = tl.maximum(m, sink)
    m = tl.where(m == float("-inf"), 0.0, m)  # a query that sees nothing gets zeros
    weight = tl.exp2(lse - m[None, :])
    total = tl.sum(weight, 0)
    if SINKS:
        total += tl.exp2(sink - m)
    out = tl.sum(o * weight[:, :, None], 0) / tl.where(total == 0, 1.0, total)[:, None]
    if progress_ptr is not None:
        out = tl.where(tl.load(progress_ptr + 3) != 0, float("nan"), out)
    b, query_heads = bh // heads, heads * (COLUMNS // QUERIES)
    at = ((b * QUERIES + token) * query_heads + head).to(tl.int64) * VALUE_DIM
    known = column_ok[:, None] & (channel < VALUE_DIM)[None, :]
    tl.store(out_ptr + at[:, None] + channel[None, :], out.to(out_ptr.dtype.element_ty), mask=known)
