"""The bytes of a cache, and how many tokens and rows fit into some."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from kvarn_hf.checks import whole
from kvarn_hf.config import KVarNConfig
from kvarn_hf.estimate.layout import layer_groups
from kvarn_hf.estimate.shapes import ModelShapes

# Longer sequences are taken for "no limit".
_LONGEST = 2**31


@dataclass(frozen=True)
class LayerKind:
    """The layers of one kind (``"packed"``, ``"dense"``, ``"sliding"``, which chunked attention is too, or
    ``"linear"``): how many there are, and what they hold in the estimated cache and in the dense one."""

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
    shapes = ModelShapes.of(config, dtype)
    packed, dense = layer_groups(shapes, _settings(kvarn)), layer_groups(shapes, None)
    sizes, dense_sizes = ([g.bytes(length, batch, decoding) for g in groups] for groups in (packed, dense))
    growth, dense_growth = (sum(g.growth() for g in groups) for groups in (packed, dense))
    kinds: dict[str, LayerKind] = {}
    for group, size, dense_size in zip(packed, sizes, dense_sizes, strict=True):
        so_far = kinds.get(group.kind, LayerKind(group.kind, 0, 0, 0))
        counts = so_far.layers + group.count, so_far.bytes + size, so_far.dense_bytes + dense_size
        kinds[group.kind] = LayerKind(group.kind, *counts)
    fixed = sum(group.fixed_bytes(batch) for group in packed)
    bits = 8 * shapes.dtype.itemsize * growth / dense_growth if dense_growth else 0.0
    return Estimate(sum(sizes), sum(dense_sizes), growth, dense_growth, fixed, bits, tuple(kinds.values()))


def most_tokens(
    config: PreTrainedConfig | ModelShapes,
    free_bytes: int,
    batch: int = 1,
    kvarn: str | KVarNConfig | None = "kvarn_k4v2_g128",
    dtype: torch.dtype | str | None = None,
) -> int | None:
    """How long ``batch`` rows can get, token by token, before their cache outgrows ``free_bytes``.

    The other arguments and the errors are those of :func:`estimate`; ``kvarn=None`` stands for the dense cache.

    Returns
    -------
    int or None
        Tokens of every row, 0 if not even one fits; None if no length is too long (2,147,483,648 tokens fit).
    """
    batch = whole("batch", batch, least=1)
    peak = _peak(ModelShapes.of(config, dtype), kvarn)
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
    peak = _peak(ModelShapes.of(config, dtype), kvarn)
    return _most(lambda batch: peak(length, batch) <= free_bytes)


def _peak(shapes: ModelShapes, kvarn: str | KVarNConfig | None) -> Callable[[int, int], int]:
    """The most bytes on the way to a length: the last tail before a tile is packed may be the largest moment."""
    settings = None if kvarn is None else _settings(kvarn)
    groups = layer_groups(shapes, settings)

    def peak(length: int, batch: int) -> int:
        lengths = {length}
        if settings is not None and (tiles := settings.packed_tiles(length)):
            lengths.add(settings.sink_length + settings.residual_length + tiles * settings.tile_size - 1)
        return max(sum(group.bytes(n, batch, decoding=True) for group in groups) for n in lengths if n)

    return peak


def _most(fits: Callable[[int], bool]) -> int | None:
    """The largest number that fits, if all below it do; None above ``_LONGEST``."""
    high = 1
    while fits(high):
        if high >= _LONGEST:
            return None
        high *= 2
    low = high // 2
    return low + bisect_left(range(low + 1, high), True, key=lambda number: not fits(number))


def _settings(kvarn: str | KVarNConfig) -> KVarNConfig:
    return kvarn if isinstance(kvarn, KVarNConfig) else KVarNConfig.from_preset(kvarn)
