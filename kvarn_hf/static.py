"""A layer's storage at fixed addresses, and the operators that read and change it without the host knowing lengths.

Everything a layer holds lies in one tensor of bytes, so that a compiled step has one input per layer to check, and the
lengths of all layers in another, ``progress`` ``[layers, 4]``: tokens held, tiles in use, whether this step packs a
tile, whether a token found no room. The operators are ``torch.library`` operators, which ``torch.compile`` takes as
they are: the lengths that a launch depends on are read on the device.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvarn_hf import ops
from kvarn_hf.config import KVarNConfig
from kvarn_hf.layer import check_like
from kvarn_hf.padding import LeftPadding
from kvarn_hf.reference.quantize import Packed
from kvarn_hf.state import DenseTokens, LayerState
from kvarn_hf.tiles import PackedTiles

if TYPE_CHECKING:
    from kvarn_kernels import Scheme
    from kvarn_kernels.append import LayerShape

_ALIGNMENT = 256


class Layout(NamedTuple):
    """All that is needed to find a layer's tensors in its storage.

    Operators take it as a text: compiled code compares everything it was traced with at every step, and one text of a
    layer is compared sooner than fifteen numbers.
    """

    dtype: str
    batch: int
    heads: int
    key_dim: int
    value_dim: int
    most: int  # tokens there is room for
    tiles: int
    dense: int
    sink_length: int
    residual_length: int
    tile_size: int
    key_bits: int
    value_bits: int
    method: str
    iterations: int
    padded: int

    @classmethod
    def of(cls, config: KVarNConfig, keys: torch.Tensor, values: torch.Tensor, most: int) -> Layout:
        """For keys and values like the ones given, and at most ``most`` tokens."""
        dense = config.sink_length + config.residual_length + config.tile_size
        return cls(
            str(keys.dtype).removeprefix("torch."),
            keys.shape[0],
            keys.shape[1],
            keys.shape[3],
            values.shape[3],
            most,
            max(1, config.packed_tiles(most)),
            dense,
            config.sink_length,
            config.residual_length,
            config.tile_size,
            config.key_bits,
            config.value_bits,
            config.method,
            config.iterations,
            0,
        )

    @property
    def text(self) -> str:
        """What :meth:`parse` reads."""
        return " ".join(str(field) for field in self)

    @staticmethod
    @lru_cache(maxsize=256)
    def parse(text: str) -> Layout:
        """The layout of :attr:`text`."""
        return Layout(*(int(field) if field.isdigit() else field for field in text.split()))  # type: ignore[arg-type]

    @property
    def token_dtype(self) -> torch.dtype:
        """Of keys and values."""
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    @property
    def config(self) -> KVarNConfig:
        """The cache's settings, as far as they shape what is stored."""
        return KVarNConfig(
            key_bits=self.key_bits,
            value_bits=self.value_bits,
            tile_size=self.tile_size,
            sink_length=self.sink_length,
            residual_length=self.residual_length,
            method=self.method,
            iterations=self.iterations,
        )


class Views(NamedTuple):
    """A layer's storage as tensors."""

    dense_keys: torch.Tensor
    dense_values: torch.Tensor
    keys: Packed
    values: Packed
    prescale: torch.Tensor
    pad: torch.Tensor
    run_key: torch.Tensor
    run_value: torch.Tensor


@lru_cache(maxsize=256)
def _pieces(layout: Layout) -> tuple[tuple[int, torch.dtype, tuple[int, ...]], ...]:
    """Offset, dtype and shape of every tensor."""
    lead, dtype = (layout.batch, layout.heads), layout.token_dtype
    tile, half = (*lead, layout.tiles), torch.float16
    key_bytes, value_bytes = layout.tile_size * layout.key_bits // 8, layout.value_dim * layout.value_bits // 8
    shapes = (
        (dtype, (*lead, layout.dense, layout.key_dim)),
        (dtype, (*lead, layout.dense, layout.value_dim)),
        (torch.uint8, (*tile, key_bytes, layout.key_dim)),
        *((half, (*tile, n)) for n in (layout.key_dim, layout.tile_size, layout.key_dim)),
        (torch.uint8, (*tile, value_bytes, layout.tile_size)),
        *((half, (*tile, n)) for n in (layout.value_dim, layout.tile_size, layout.tile_size)),
        (half, (*lead, layout.key_dim)),
        (torch.int64, (layout.batch,)),
        (dtype, (*lead, 1, layout.key_dim)),
        (dtype, (*lead, 1, layout.value_dim)),
    )
    pieces, offset = [], 0
    for kind, shape in shapes:
        pieces.append((offset, kind, shape))
        offset += -(-_bytes(kind, shape) // _ALIGNMENT) * _ALIGNMENT
    return *pieces, (offset, torch.uint8, (0,))


def _bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def allocate(layout: Layout, device: torch.device) -> torch.Tensor:
    """The storage of one layer."""
    return zeros((_pieces(layout)[-1][0],), torch.uint8, device)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros at an address that compiled code may rely on, which can be changed in and outside of inference mode."""
    with torch.inference_mode(False):
        x = torch.zeros(shape, dtype=dtype, device=device)
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(x)
    return x


def own(x: torch.Tensor) -> torch.Tensor:
    """A copy like :func:`zeros`, of a tensor that may have been made in inference mode."""
    copy = zeros(tuple(x.shape), x.dtype, x.device)
    copy.copy_(x)
    return copy


def views(storage: torch.Tensor, layout: Layout) -> Views:
    """The tensors that lie in ``storage``."""
    parts = [
        storage[offset : offset + _bytes(kind, shape)].view(kind).view(shape)
        for offset, kind, shape in _pieces(layout)[:-1]
    ]
    return Views(parts[0], parts[1], Packed(*parts[2:6]), Packed(*parts[6:10]), *parts[10:])


def state_of(storage: torch.Tensor, layout: Layout, length: int, count: int) -> LayerState:
    """What the storage holds, as a value: dense tokens copied, tiles where they are."""
    v, config = views(storage, layout), layout.config
    used = length - count * config.tile_size
    dense = DenseTokens.copied(v.dense_keys[:, :, :used], v.dense_values[:, :, :used])
    padding = None
    if count and layout.padded:
        padding = LeftPadding(v.pad.clamp_min(1), length, v.run_key, v.run_value)
    prescale = v.prescale.clone() if count and config.method == "kvarn" else None
    return LayerState(config, dense, PackedTiles(v.keys, v.values, count), prescale, padding)


def put(state: LayerState, storage: torch.Tensor, layout: Layout) -> None:
    """Make the storage hold ``state``; tiles that are there already are not copied."""
    v = views(storage, layout)
    v.dense_keys[:, :, : state.dense.length] = state.dense.keys
    v.dense_values[:, :, : state.dense.length] = state.dense.values
    if state.tiles.rows is not None or state.tiles.keys.codes.data_ptr() != v.keys.codes.data_ptr():
        for target, source in zip(
            (*v.keys, *v.values), (t for part in state.tiles.filled() for t in part), strict=True
        ):
            target[:, :, : state.count] = source
    v.prescale.copy_(torch.ones_like(v.prescale) if state.prescale is None else state.prescale)
    padding = padding_of(state)
    v.pad.zero_()
    if padding is not None:
        v.pad.copy_(padding.length)
        v.run_key.copy_(padding.key)
        v.run_value.copy_(padding.value)


def padding_of(state: LayerState) -> LeftPadding | None:
    """The left padding of a state, also while nothing is packed; None for a single row."""
    if state.count or state.dense.key_buffer.shape[0] == 1 or state.length == 0:
        return state.padding
    return LeftPadding.begin(state.dense.keys, state.dense.values).scanned_to(state)


@torch.library.custom_op("kvarn_hf::advance", mutates_args=("progress",))
def advance(progress: torch.Tensor, layout: str) -> None:
    """Begin a step of one token in every layer."""
    shape = Layout.parse(layout)
    if ops.uses_kernels(progress.device):
        from kvarn_kernels.append import advance as kernel

        kernel(progress, _shape(shape))
        return
    length, count = progress[:, 0].clone(), progress[:, 1].clone()
    behind = length - shape.sink_length - shape.residual_length
    ready = torch.maximum(torch.div(behind, shape.tile_size, rounding_mode="floor"), count)
    room = length < shape.most
    progress.copy_(torch.stack([length + room, torch.where(room, ready, count), (ready - count) * room, ~room], 1))


def check_tokens(keys: torch.Tensor, values: torch.Tensor, layout: Layout, device: torch.device) -> None:
    """Refuse tokens that are not like those held."""
    for name, x, dim in (("key_states", keys, layout.key_dim), ("value_states", values, layout.value_dim)):
        check_like(name, x, (layout.batch, layout.heads, dim), layout.token_dtype, device)


@torch.library.custom_op("kvarn_hf::pack", mutates_args=("storages",))
def pack(
    storages: list[torch.Tensor], rows: list[int], table: torch.Tensor, progress: torch.Tensor, layout: str
) -> None:
    """Pack, in the layers ``rows`` that have these storages, the tile that is due; ``table`` is :func:`addresses` of
    every layer. If it is interrupted, what is done is no longer due."""
    shape = Layout.parse(layout)
    if ops.uses_kernels(progress.device):
        _pack_by_kernel(progress, table, shape)
        return
    done: list[int] = []
    try:
        for storage, row in zip(storages, rows, strict=True):
            length, count, due, _ = progress[row].tolist()
            if due:
                put(state_of(storage, shape, length - 1, count - due).committed(), storage, shape)
            done.append(row)
    except BaseException:
        progress[done, 2] = 0
        raise


def may_skip_pack(progress: torch.Tensor) -> bool:
    """Whether :func:`pack` would only wait for its kernel to be compiled; not to be asked in compiled code."""
    if not ops.uses_kernels(progress.device):
        return False
    from kvarn_kernels.append import may_skip_pack as asked

    return asked(progress)


def addresses(storage: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Of a layer's tensors, as the packing kernel wants them."""
    v = views(storage, layout)
    tensors = v.dense_keys, v.dense_values, *v.keys, *v.values, v.prescale, v.pad
    return torch.tensor([x.data_ptr() for x in tensors])


@lru_cache(maxsize=256)
def _shape(layout: Layout) -> LayerShape:
    """What the kernels must know of a layer."""
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


def _scheme(layout: Layout) -> Scheme:
    from kvarn_kernels import Scheme

    return Scheme(layout.key_bits, layout.value_bits, layout.method, layout.iterations)


def _pack_by_kernel(progress: torch.Tensor, table: torch.Tensor, layout: Layout, ahead: bool = False) -> None:
    from kvarn_kernels.append import pack as kernel

    kernel(progress, table, _shape(layout), _scheme(layout), ahead=ahead)


@torch.library.custom_op("kvarn_hf::write", mutates_args=("storage",))
def write(
    storage: torch.Tensor, progress: torch.Tensor, row: int, keys: torch.Tensor, values: torch.Tensor, layout: str
) -> None:
    """Write one token per row behind the tail. Doing it again changes nothing."""
    shape = Layout.parse(layout)
    v = views(storage, shape)
    if ops.uses_kernels(keys.device):
        from kvarn_kernels.append import write as kernel

        kernel(keys, values, progress[row], v.dense_keys, v.dense_values, _shape(shape))
        return
    length, count, _, full = progress[row].tolist()
    if not full:
        index = length - 1 - count * shape.tile_size
        v.dense_keys[:, :, index], v.dense_values[:, :, index] = keys[:, :, 0], values[:, :, 0]


@write.register_fake
def _(storage, progress, row, keys, values, layout):  # type: ignore[no-untyped-def]
    check_tokens(keys, values, Layout.parse(layout), storage.device)


def compile_ahead(
    storage: torch.Tensor,
    table: torch.Tensor,
    progress: torch.Tensor,
    row: int,
    layout: Layout,
    query_heads: int | None,
) -> None:
    """Begin to compile the kernels of :func:`attend`, if it is to be called (with so many ``query_heads``), and of
    :func:`pack`, which takes longest and is needed least soon, while the host has other things to do."""
    if not ops.uses_kernels(storage.device):
        return

    def tokens(heads: int, dim: int) -> torch.Tensor:  # as attention modules hand them over
        empty = torch.empty(layout.batch, 1, heads, dim, dtype=layout.token_dtype, device=storage.device)
        return empty.transpose(1, 2)

    query = tokens(query_heads or layout.heads, layout.key_dim)
    if query_heads is not None and _fused(query, layout):
        # As generate() masks a compiled step.
        mask = torch.empty(layout.batch, 1, 1, layout.most, dtype=torch.bool, device=storage.device)
        token = tokens(layout.heads, layout.key_dim), tokens(layout.heads, layout.value_dim)
        _attend_by_kernel(query, token, storage, progress[row], mask, None, layout, 1.0, 0.0, ahead=True)
    _pack_by_kernel(progress, table, layout, ahead=True)


@torch.library.custom_op("kvarn_hf::attend", mutates_args=("storage",))
def attend(
    query: torch.Tensor,
    keys: torch.Tensor | None,
    values: torch.Tensor | None,
    storage: torch.Tensor,
    progress: torch.Tensor,
    row: int,
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
    if ops.uses_kernels(query.device) and _fused(query, shape):
        return _attend_by_kernel(query, token, storage, progress[row], mask, sinks, shape, scaling, softcap)
    if token is not None:
        write(storage, progress, row, *token, layout)
    if not ops.uses_kernels(query.device):
        length, count, _, full = progress[row].tolist()
        state = state_of(storage, shape, length, count)
        mask = None if mask is None else mask[..., :length]
        out = ops.attend(state, query, mask, scaling=scaling, softcap=softcap or None, sinks=sinks)
        if out is None:
            out = _exact(query, *ops.dense(state), mask, sinks, scaling, softcap)
        return out.fill_(torch.nan) if full else out
    keys, values = read(storage, progress, row, layout)
    held = (torch.arange(shape.most, device=query.device) < progress[row, 0])[None, None, None]
    if mask is None:
        mask = held
    else:
        mask = mask[..., : shape.most]
        mask = mask & held if mask.dtype == torch.bool else mask.masked_fill(~held, -torch.inf)
    mask = mask.expand(query.shape[0], -1, -1, -1)
    out = _exact(query, keys, values, mask, sinks, scaling, softcap)
    return out.masked_fill(progress[row, 3] > 0, torch.nan)


@attend.register_fake
def _(query, keys, values, storage, progress, row, mask, sinks, layout, scaling, softcap):  # type: ignore[no-untyped-def]
    if keys is not None:
        check_tokens(keys, values, Layout.parse(layout), storage.device)
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], Layout.parse(layout).value_dim)


def _fused(query: torch.Tensor, layout: Layout) -> bool:
    from kvarn_kernels.decode_attention import supported

    return supported(query, layout.value_dim, layout.tile_size, layout.key_bits, layout.value_bits)


def _attend_by_kernel(
    query: torch.Tensor,
    token: tuple[torch.Tensor, torch.Tensor] | None,
    storage: torch.Tensor,
    progress: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    layout: Layout,
    scaling: float,
    softcap: float,
    ahead: bool = False,
) -> torch.Tensor:
    from kvarn_kernels import Held, Run, Step
    from kvarn_kernels import Packed as PackedArrays
    from kvarn_kernels.decode_attention import decode_attention

    v = views(storage, layout)
    held = Held(
        PackedArrays(*v.keys),
        PackedArrays(*v.values),
        v.prescale if layout.method == "kvarn" else None,
        None,
        v.dense_keys,
        v.dense_values,
        Run(v.pad, v.run_key, v.run_value) if layout.padded else None,
        layout.tiles,
        layout.sink_length,
        _scheme(layout),
    )
    return decode_attention(
        query,
        held,
        mask,
        scaling=scaling,
        causal=False,
        softcap=softcap or None,
        sinks=sinks,
        step=Step(progress, *(token or ())),
        ahead=ahead,
    )


def _exact(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scaling: float,
    softcap: float,
) -> torch.Tensor:
    if sinks is None and not softcap:
        groups = query.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling).transpose(1, 2)
    from kvarn_hf.reference.attention import attention

    return attention(
        query,
        keys,
        values,
        mask,
        scaling=scaling,
        causal=False,
        softcap=softcap or None,
        sinks=sinks,
        dtype=torch.float32,
    ).to(query.dtype)


@torch.library.custom_op("kvarn_hf::read", mutates_args=())
def read(storage: torch.Tensor, progress: torch.Tensor, row: int, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """All keys and values, dense, ``[batch, heads, most, head_dim]``; zero behind the last token."""
    shape = Layout.parse(layout)
    v, config = views(storage, shape), shape.config
    size, sink = config.tile_size, config.sink_length
    length, count = progress[row, 0], progress[row, 1]
    tail_start = torch.where(count > 0, sink + count * size, 0)
    # Every tile there is room for, as if it were in use, between the sinks and no tail.
    state = LayerState(
        config,
        DenseTokens(v.dense_keys, v.dense_values, sink),
        PackedTiles(v.keys, v.values, shape.tiles),
        v.prescale if config.method == "kvarn" else None,
        LeftPadding(v.pad * (count > 0), 0, v.run_key, v.run_value) if shape.padded else None,
    )
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

    keys, values = ops.dense(state)
    return whole(keys, v.dense_keys), whole(values, v.dense_values)


@read.register_fake
def _(storage, progress, row, layout):  # type: ignore[no-untyped-def]
    shape = Layout.parse(layout)
    lead = shape.batch, shape.heads, shape.most
    return tuple(storage.new_empty(*lead, dim, dtype=shape.token_dtype) for dim in (shape.key_dim, shape.value_dim))
