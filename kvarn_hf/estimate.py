"""What a cache will hold, from a model's config alone: no weights, no download, no tokens.

Nothing here knows a model's shapes. The model is built on torch's meta device, where tensors have shapes and no data,
and two tokens pass through it; then the layers of a real cache are laid out there at any length.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionCacheLayerMixin

from kvarn_hf.cache import KVarNCache
from kvarn_hf.checks import whole
from kvarn_hf.config import KVarNConfig
from kvarn_hf.layers.growing import KVarNLayer
from kvarn_hf.layers.stock import tensors_in
from kvarn_hf.state.dense import DenseTokens
from kvarn_hf.state.layer_state import LayerState
from kvarn_hf.state.padding import LeftPadding
from kvarn_hf.state.tiles import PackedTiles

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Longer sequences are taken for "no limit".
_LONGEST = 2**31


@dataclass(frozen=True)
class LayerKind:
    """The layers of one kind, together.

    Parameters
    ----------
    name : str
        ``"packed"``, ``"dense"``, ``"sliding"`` (sliding-window and chunked attention) or ``"linear"``.
    layers : int
        How many there are.
    bytes, dense_bytes : int
        What they hold in the estimated cache, and in the dense one.
    """

    name: str
    layers: int
    bytes: int
    dense_bytes: int


@dataclass(frozen=True)
class Estimate:
    """The bytes of a cache and of the dense one.

    Parameters
    ----------
    bytes, dense_bytes : int
        All storage of all layers and rows, unused capacity included: equal to ``KVarNCache.memory_footprint()``, and
        the same of Transformers' ``DynamicCache``.
    bytes_per_token, dense_bytes_per_token : float
        By which one more token of one row makes them grow in the long run, spare capacity not counted.
    fixed_bytes : int
        The most that is held however long the rows get: sinks, the longest tail, sliding windows, linear-attention
        states.
    bits_per_element : float
        Mean stored bits per key or value element of the layers that grow; 0 if there are none.
    kinds : tuple of LayerKind
    """

    bytes: int
    dense_bytes: int
    bytes_per_token: float
    dense_bytes_per_token: float
    fixed_bytes: int
    bits_per_element: float
    kinds: tuple[LayerKind, ...]

    @property
    def ratio(self) -> float:
        """How many times smaller than the dense cache."""
        return self.dense_bytes / self.bytes


@dataclass(frozen=True)
class _Shape:
    """What one row puts into one layer."""

    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    linear_bytes: int = 0


@dataclass(frozen=True)
class ModelShapes:
    """What an estimate needs to know of a model; :meth:`probe` finds it out. Takes the place of a config."""

    config: PreTrainedConfig
    dtype: torch.dtype
    parameters: int
    weight_bytes: int
    layers: tuple[_Shape, ...]

    @classmethod
    def probe(cls, config: PreTrainedConfig, dtype: torch.dtype | str | None = None) -> ModelShapes:
        """Build the model without data, and pass two tokens through it.

        Parameters
        ----------
        config : PreTrainedConfig
        dtype : torch.dtype or str, optional
            Of weights and cache. None: the config's own, or bfloat16 if it names none.

        Raises
        ------
        ValueError
            If ``dtype`` is not one a cache can hold, or the model is no decoder that can be built this way.
        """
        if not isinstance(config, PreTrainedConfig):
            raise ValueError(f"config must be a model's config, got {config!r}")
        chosen = _dtype(config, dtype)
        try:
            # A copy: building a model writes the choices below into its config.
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(
                    copy.deepcopy(config),
                    dtype=chosen,
                    attn_implementation="eager",
                    experts_implementation="batched_mm",  # the one whose shapes do not depend on the data
                )
            cache = DynamicCache(config=config)
            tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")
            with torch.no_grad(), _WithoutData():
                # Transformers renamed the argument in 5.24.
                argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
                model(input_ids=tokens, use_cache=True, **{argument: cache})
        except Exception as error:  # of any model's own code
            raise ValueError(
                f"config of type {config.model_type!r} gives no decoder to estimate: {_first_line(error)}"
            ) from error
        parameters = sum(p.numel() for p in model.parameters())
        return cls(config, chosen, parameters, model.get_memory_footprint(), tuple(map(_shape, cache.layers)))


def load_config(path: str | Path) -> PreTrainedConfig:
    """Read a model's config from a ``config.json`` or the folder it is in, without touching the network.

    Raises
    ------
    ValueError
        If there is none, or Transformers does not know its model type.
    """
    if str(path).endswith(".gguf"):
        raise ValueError(f"model must be a config.json or a folder with one, got the GGUF file {str(path)!r}")
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ValueError(f"model must be a config.json or a folder with one, got {str(path)!r}")
    try:
        return AutoConfig.from_pretrained(file, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = _first_line(error)
        raise ValueError(f"model must be a config that Transformers knows, got {str(file)!r}: {reason}") from error


def estimate(
    config: PreTrainedConfig | ModelShapes,
    length: int,
    batch: int = 1,
    kvarn: str | KVarNConfig = "kvarn_k4v2_g128",
    dtype: torch.dtype | str | None = None,
    *,
    decoding: bool = False,
) -> Estimate:
    """Bytes of a cache that holds ``length`` tokens in each of ``batch`` rows.

    Parameters
    ----------
    config : PreTrainedConfig or ModelShapes
        A model's config. :meth:`ModelShapes.probe` spares many estimates of one model its construction.
    length : int
        Tokens of every row.
    batch : int
        Rows.
    kvarn : str or KVarNConfig
        A preset name, or settings.
    dtype : torch.dtype or str, optional
        The model's; None: the config's own, or bfloat16 if it names none.
    decoding : bool
        False: all tokens came in one forward pass. True: the last one came in a step of its own. Sliding-window layers
        keep the storage of a whole prompt until the step after it; packed layers hold the same either way.

    Returns
    -------
    Estimate

    Raises
    ------
    ValueError
        If an argument is out of range, or the config gives no decoder.

    Examples
    --------
    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(num_hidden_layers=2, num_key_value_heads=8, hidden_size=1024, num_attention_heads=8)
    >>> held = estimate(config, 32768, dtype="bfloat16")
    >>> held.bits_per_element, round(held.ratio, 2)
    (3.375, 4.57)
    """
    length, batch = whole("length", length, least=1), whole("batch", batch, least=1)
    shapes = _shapes(config, dtype)
    packed, dense = _groups(shapes, _settings(kvarn)), _groups(shapes, None)
    sizes = [group.bytes(length, batch, decoding) for group in packed]
    dense_sizes = [group.bytes(length, batch, decoding) for group in dense]
    growth, dense_growth = sum(g.growth() for g in packed), sum(g.growth() for g in dense)
    kinds: dict[str, LayerKind] = {}
    for group, size, dense_size in zip(packed, sizes, dense_sizes, strict=True):
        before = kinds.get(group.kind, LayerKind(group.kind, 0, 0, 0))
        layers = before.layers + group.count
        kinds[group.kind] = LayerKind(group.kind, layers, before.bytes + size, before.dense_bytes + dense_size)
    return Estimate(
        bytes=sum(sizes),
        dense_bytes=sum(dense_sizes),
        bytes_per_token=growth,
        dense_bytes_per_token=dense_growth,
        fixed_bytes=sum(group.fixed_bytes(batch) for group in packed),
        bits_per_element=8 * shapes.dtype.itemsize * growth / dense_growth if dense_growth else 0.0,
        kinds=tuple(kinds.values()),
    )


def most_tokens(
    config: PreTrainedConfig | ModelShapes,
    free_bytes: int,
    batch: int = 1,
    kvarn: str | KVarNConfig | None = "kvarn_k4v2_g128",
    dtype: torch.dtype | str | None = None,
) -> int | None:
    """How long ``batch`` rows can get, token by token, before their cache outgrows ``free_bytes``.

    Parameters
    ----------
    config, batch, kvarn, dtype
        As for :func:`estimate`; ``kvarn=None`` stands for the dense cache.
    free_bytes : int
        Memory for the cache.

    Returns
    -------
    int or None
        Tokens of every row, 0 if not even one fits; None if no length is too long (2,147,483,648 tokens fit).

    Raises
    ------
    ValueError
        As :func:`estimate`.
    """
    batch = whole("batch", batch, least=1)
    shapes = _shapes(config, dtype)
    settings = None if kvarn is None else _settings(kvarn)
    peak = _peak(_groups(shapes, settings), settings)
    return _most(lambda length: peak(length, batch) <= free_bytes)


def most_rows(
    config: PreTrainedConfig | ModelShapes,
    free_bytes: int,
    length: int,
    kvarn: str | KVarNConfig | None = "kvarn_k4v2_g128",
    dtype: torch.dtype | str | None = None,
) -> int | None:
    """How many rows can grow to ``length`` tokens each before their cache outgrows ``free_bytes``; see
    :func:`most_tokens`."""
    length = whole("length", length, least=1)
    shapes = _shapes(config, dtype)
    settings = None if kvarn is None else _settings(kvarn)
    peak = _peak(_groups(shapes, settings), settings)
    return _most(lambda batch: peak(length, batch) <= free_bytes)


def show(
    shapes: ModelShapes,
    weight_bytes: int,
    gpu_bytes: int,
    utilization: float,
    batch: int,
    length: int,
    presets: Iterable[KVarNConfig],
    console: Console,
) -> None:
    """Print what fits beside the weights, one line for the dense cache and for each preset.

    Raises
    ------
    ValueError
        If the weights alone do not fit.
    """
    usable = int(gpu_bytes * utilization)
    if weight_bytes >= usable:
        raise ValueError(
            f"the weights take {_gib(weight_bytes)}, more than the {_gib(usable)} that may be used "
            f"({utilization:.0%} of {_gib(gpu_bytes)})"
        )
    table = Table(box=SIMPLE_HEAD, padding=0)
    table.add_column("cache", no_wrap=True)
    for column, least in (
        ("bits per element", 7),
        ("bytes per token", 7),
        (f"{_rows(batch)} of {length:,} tokens", 10),
        ("times smaller", 7),
        (f"most tokens per row, {_rows(batch)}", 9),
        (f"most rows of {length:,} tokens", 7),
    ):
        # Digits that find no room go to the next line, rather than away.
        table.add_column(column, justify="right", overflow="fold", min_width=least)
    free = usable - weight_bytes
    for settings in (None, *presets):
        found = estimate(shapes, length, batch, settings or KVarNConfig(), decoding=True)
        bits = found.bits_per_element if settings else 8.0 * shapes.dtype.itemsize
        growth = found.bytes_per_token if settings else found.dense_bytes_per_token
        table.add_row(
            settings.name if settings else "dense",
            f"{bits:g}" if growth else "-",
            f"{growth:,.0f}",
            _gib(found.bytes if settings else found.dense_bytes),
            f"{found.ratio if settings else 1:.2f}",
            _number(most_tokens(shapes, free, batch, settings)),
            _number(most_rows(shapes, free, length, settings)),
        )
    console.print(table)
    console.print(
        f"Assumed: {shapes.parameters:,} parameters in {str(shapes.dtype).removeprefix('torch.')}, weights of "
        f"{_gib(weight_bytes)}, and {1 - utilization:.0%} of {_gib(gpu_bytes)} reserved for activations and all else; "
        f"{_gib(free)} are left for the cache.",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


@dataclass(frozen=True)
class _Group:
    """Layers that hold the same: what they are, what enters each, and a fresh one to lay out."""

    shape: _Shape
    fresh: Any
    count: int
    dtype: torch.dtype

    @property
    def kind(self) -> str:
        if isinstance(self.fresh, KVarNLayer):
            return "packed"
        if isinstance(self.fresh, LinearAttentionCacheLayerMixin):
            return "linear"
        return "sliding" if getattr(self.fresh, "is_sliding", False) else "dense"

    def bytes(self, length: int, batch: int, decoding: bool) -> int:
        """Of all the layers, with ``length`` tokens in each row."""
        linear = batch * self.shape.linear_bytes
        if isinstance(self.fresh, KVarNLayer) and self.shape.heads:
            return self.count * _size(self._packed(length, batch).parts.values())
        layer = copy.copy(self.fresh)
        if self.shape.heads:
            steps = (length - 1, 1) if decoding and length > 1 else (length,)
            for new in steps:
                layer.update(*self._states(new, batch))
        return self.count * (_size(tensors_in(vars(layer).values())) + linear)

    def growth(self) -> float:
        """Bytes per token of one row, in the long run."""
        if isinstance(self.fresh, KVarNLayer) and self.shape.heads:
            config = self._settings()
            tile = config.key_tile_bytes(self.shape.key_dim) + config.value_tile_bytes(self.shape.value_dim)
            return self.count * self.shape.heads * tile / config.tile_size
        grows = isinstance(self.fresh, DynamicLayer) and not self.fresh.is_sliding
        return float(self.count * _size(self._states(1, 1))) if grows else 0.0

    def fixed_bytes(self, batch: int) -> int:
        """The most that does not grow."""
        if isinstance(self.fresh, KVarNLayer) and self.shape.heads:
            config = self._settings()
            longest = config.sink_length + config.residual_length + 2 * config.tile_size - 1
            state = self._packed(longest, batch)
            return self.count * (_size(state.parts.values()) - _size(state.tiles.parts.values()))
        if self.kind == "dense":
            return 0
        if isinstance(self.fresh, DynamicLayer) and self.fresh.is_sliding:
            return self.bytes(self.fresh.sliding_window, batch, decoding=True)
        return self.count * batch * self.shape.linear_bytes

    def _settings(self) -> KVarNConfig:
        # The layer itself decides, e.g. to keep the rotary part of latent attention's keys at 8 bits.
        layer = copy.copy(self.fresh)
        layer.lazy_initialization(*self._states(1, 1))
        settings: KVarNConfig = layer.state.config
        return settings

    def _states(self, length: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        lead, dims = (batch, self.shape.heads, length), (self.shape.key_dim, self.shape.value_dim)
        keys, values = (torch.empty(*lead, dim, dtype=self.dtype, device="meta") for dim in dims)
        return keys, values

    def _packed(self, length: int, batch: int) -> LayerState:
        config = self._settings()
        count = config.packed_tiles(length)
        keys, values = self._states(length - count * config.tile_size, batch)
        heads, key_dim, value_dim = self.shape.heads, self.shape.key_dim, self.shape.value_dim
        tiles = PackedTiles.allocate(batch, heads, key_dim, value_dim, config, count, keys.device)
        prescale = keys.new_empty(batch, heads, key_dim, dtype=torch.float16) if config.method == "kvarn" else None
        return LayerState(
            config,
            DenseTokens.copied(keys, values),
            tiles.truncated(count),
            prescale if count else None,
            LeftPadding.begin(DenseTokens.of(keys, values)) if count and batch > 1 else None,
        )


class _WithoutData(TorchDispatchMode):
    """Lets models that look at their data (is this prompt longer than ..., which experts are used) run without any."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.zeros((), dtype=args[0].dtype).item()
        if func is torch.ops.aten.nonzero.default and args[0].is_meta:
            return args[0].new_empty(0, args[0].ndim, dtype=torch.int64)
        return func(*args, **(kwargs or {}))


def _shape(layer: Any) -> _Shape:
    """Of a stock layer that has seen one row of tokens."""
    if getattr(layer, "indexer_keys", None) is not None:
        raise ValueError("config must be of a model without sparse-attention indexers, whose layers are not estimated")
    linear = 0
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        linear = _size(tensors_in([layer.conv_states, layer.recurrent_states]))
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    # Layers that use another one's keys and values are never updated.
    if keys is None or values is None:
        return _Shape(linear_bytes=linear)
    return _Shape(keys.shape[1], keys.shape[3], values.shape[3], linear)


def _groups(shapes: ModelShapes, settings: KVarNConfig | None) -> list[_Group]:
    """Of the dense cache if there are no settings; in the order of the layers either way."""
    cache = DynamicCache(config=shapes.config) if settings is None else KVarNCache(shapes.config, settings)
    groups: dict[tuple[Any, ...], _Group] = {}
    for layer, shape in zip(cache.layers, shapes.layers, strict=True):
        key = (type(layer), getattr(layer, "sliding_window", None), shape)
        count = groups[key].count + 1 if key in groups else 1
        groups[key] = _Group(shape, layer, count, shapes.dtype)
    return list(groups.values())


def _peak(groups: list[_Group], settings: KVarNConfig | None) -> Callable[[int, int], int]:
    """The most bytes on the way to a length: the last tail before a tile is packed may be the largest moment."""

    def total(length: int, batch: int) -> int:
        return sum(group.bytes(length, batch, decoding=True) for group in groups)

    def peak(length: int, batch: int) -> int:
        lengths = {length}
        if settings is not None:
            first = settings.sink_length + settings.residual_length + settings.tile_size
            if length >= first:
                lengths.add(length - (length - first) % settings.tile_size - 1)
        return max(total(n, batch) for n in lengths if n)

    return peak


def _most(fits: Callable[[int], bool]) -> int | None:
    """The largest number that fits, if all below it do; None above ``_LONGEST``."""
    if not fits(1):
        return 0
    low = 1
    while fits(2 * low):
        low *= 2
        if low >= _LONGEST:
            return None
    high = 2 * low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _shapes(config: PreTrainedConfig | ModelShapes, dtype: torch.dtype | str | None) -> ModelShapes:
    if not isinstance(config, ModelShapes):
        return ModelShapes.probe(config, dtype)
    if dtype is not None and _dtype(config.config, dtype) != config.dtype:
        raise ValueError(f"dtype must be {config.dtype}, of which the model was probed, got {dtype}")
    return config


def _settings(kvarn: str | KVarNConfig) -> KVarNConfig:
    return kvarn if isinstance(kvarn, KVarNConfig) else KVarNConfig.from_preset(kvarn)


def _dtype(config: PreTrainedConfig, dtype: torch.dtype | str | None) -> torch.dtype:
    if dtype is None:
        dtype = getattr(config.get_text_config(decoder=True), "dtype", None) or config.dtype or torch.bfloat16
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {name!r}")
    return _DTYPES[name]


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _size(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of their storage; no two of a layer's tensors share one."""
    return sum(t.untyped_storage().nbytes() for t in tensors)


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.2f} MiB"


def _rows(batch: int) -> str:
    return "1 row" if batch == 1 else f"{batch:,} rows"


def _number(count: int | None) -> str:
    return "no limit" if count is None else f"{count:,}"
