"""Every cache that is compared, by name.

``dense``, ``quanto-int4``, ... from the table below; any other name is a method of :data:`kvarn_hf.config.METHODS` and
a preset, ``<method>_k<key bits>v<value bits>_g<tile size>``: ``kvarn_k4v2_g128``, ``published_k2v2_g128``,
``hadamard_k4v2_g128``, ``rtn_k4v2_g128``. ``rtn`` is KIVI's layout (rounding alone, keys per channel and values per
token) with the sinks, the tail and the tiles of all the others.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from kvarn_hf.cache import KVarNCache
from kvarn_hf.config import METHODS, PRESETS, KVarNConfig

# In the order in which they are worth having when time is short.
_BY_WORTH = """
    kvarn_k4v2_g128 published_k4v2_g128 quanto-int4 rtn_k4v2_g128
    kvarn_k2v2_g128 published_k2v2_g128 hadamard_k4v2_g128
    kvarn_k3v2_g128 kvarn_k4v4_g128 published_k4v4_g128 hqq-int4 turboquant-4bit
    rtn_k2v2_g128 hadamard_k2v2_g128 published_k3v2_g128 quanto-int2 hqq-int2
"""
DEFAULT_CACHES = tuple(_BY_WORTH.split())


@dataclass(frozen=True)
class CacheSpec:
    """A cache that can be made for any model.

    ``make`` takes the model and returns an empty cache, and ``release`` undoes what that did to the model.
    ``bits_per_element`` takes head_dim and returns the stored bits of a quantized key or value element, scales
    included, in a model of 16-bit floating point. ``kvarn`` are the settings of a :class:`~kvarn_hf.KVarNCache`,
    ``package`` is what must be importable. Where ``reads_in_blocks`` is False, only single new tokens attend to the
    history.
    """

    name: str
    make: Callable[[Any], Any]
    bits_per_element: Callable[[int], float]
    kvarn: KVarNConfig | None = None
    package: str | None = None
    reads_in_blocks: bool = True
    release: Callable[[Any], None] = lambda model: None

    @property
    def available(self) -> bool:
        """Whether the package it needs is installed."""
        return self.package is None or importlib.util.find_spec(self.package.partition(".")[0]) is not None

    def tiles(self, length: int) -> int | None:
        """Tiles that are packed once a row holds ``length`` tokens; None for caches without tiles."""
        return None if self.kvarn is None else self.kvarn.packed_tiles(length)

    @contextmanager
    def opened(self, model: Any) -> Iterator[Any]:
        """An empty cache, and afterwards the model as it was."""
        if not self.available:
            raise ValueError(f"cache {self.name!r} needs the package {self.package!r}, which is not installed")
        try:
            yield self.make(model)
        finally:
            self.release(model)


def cache_spec(name: str, **overrides: Any) -> CacheSpec:
    """The cache of that name.

    Parameters
    ----------
    name : str
        See the module's docstring.
    **overrides
        Fields of :class:`~kvarn_hf.KVarNConfig` to replace, such as ``sink_length``.

    Raises
    ------
    ValueError
        If there is no such cache, or one without settings is given overrides.
    """
    if name in _OTHERS:
        if overrides:
            raise ValueError(f"{', '.join(overrides)} cannot be set: cache {name!r} is not of this package")
        return _OTHERS[name]
    method, _, widths = name.partition("_")
    try:
        if method not in METHODS:
            raise ValueError(method)
        config = KVarNConfig.from_preset(f"kvarn_{widths}")
    except ValueError as error:
        presets = ", ".join(preset.removeprefix("kvarn_") for preset in PRESETS)
        raise ValueError(
            f"cache must be one of {', '.join(_OTHERS)}, or <method>_<preset> with a method of {', '.join(METHODS)} "
            f"and a preset such as {presets}, got {name!r}"
        ) from error
    config = config.replace(method=method).replace(**overrides)
    return CacheSpec(name, lambda model: KVarNCache(model.config, config), config.bits_per_element, config)


def full_attention_layers(config: Any) -> list[int]:
    """Which layers of a model a quantized cache quantizes."""
    layers = DynamicCache(config=config).layers
    return [i for i, layer in enumerate(layers) if type(layer) is DynamicLayer]


def _with_layers(make_layer: Callable[[], Any]) -> Callable[[Any], Cache]:
    """A cache whose full-attention layers are of another kind.

    Transformers' own QuantizedCache is built so too, but refuses models that also have sliding windows.
    """

    def make(model: Any) -> Cache:
        layers = DynamicCache(config=model.config).layers
        return Cache(layers=[make_layer() if type(layer) is DynamicLayer else layer for layer in layers])

    return make


def _turboquant_layer(bits: int) -> Any:
    import numpy
    from turboquant.cache import TurboQuantLayer

    # turboquant 0.2.0 calls a function by the name that numpy 2.4 took away.
    vars(numpy).setdefault("trapz", numpy.trapezoid)

    class Layer(TurboQuantLayer):
        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
            return super().update(key_states, value_states)  # newer models pass an argument that it does not take

    return Layer(bits=bits)


def _fused_turboquant(name: str, **options: Any) -> Callable[[Any], Any]:
    """A function of the package that is imported when it is called."""
    return lambda model: getattr(import_module("fused_turboquant.hf.fused_cache"), name)(model, **options)


def _quantized(backend: str, bits: int, package: str) -> CacheSpec:
    def layer() -> Any:
        from transformers.cache_utils import HQQQuantizedLayer, QuantoQuantizedLayer

        if backend == "quanto":
            return QuantoQuantizedLayer(nbits=bits)
        return HQQQuantizedLayer(nbits=bits, axis_key=1, axis_value=1)  # the axis that its documentation recommends

    stored = bits + 2 * 16 / 64  # a scale and a zero point for every 64 elements
    return CacheSpec(f"{backend}-int{bits}", _with_layers(layer), lambda head_dim: stored, package=package)


_OTHERS = {
    spec.name: spec
    for spec in (
        CacheSpec("dense", lambda model: DynamicCache(config=model.config), lambda head_dim: 16.0),
        *(_quantized("quanto", bits, "optimum.quanto") for bits in (4, 2)),
        *(_quantized("hqq", bits, "hqq") for bits in (4, 2)),
        # Codes of any width take a byte each, and a vector's norm is a float32.
        CacheSpec(
            "turboquant-4bit",
            _with_layers(lambda: _turboquant_layer(4)),
            lambda head_dim: 8 + 32 / head_dim,
            package="turboquant",
        ),
        CacheSpec(
            "fused-turboquant-4bit",
            _fused_turboquant("patch_model", bits=4, verify=False),
            lambda head_dim: 4 + 32 / head_dim,
            package="fused_turboquant",
            reads_in_blocks=False,
            release=_fused_turboquant("unpatch_model"),
        ),
    )
}
NAMED_CACHES = tuple(_OTHERS)
