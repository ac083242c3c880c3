"""The settings of a KVarN cache: which bits, which tile, which regions stay dense."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvarn_hf.checks import whole

METHODS = ("kvarn", "published", "hadamard", "rtn")
BIT_WIDTHS = (2, 3, 4, 8)
TILE_SIZES = (64, 128)

# Iterations of variance normalization: the improved algorithm converges in two; the paper's figures use eight or more.
_DEFAULT_ITERATIONS = {"kvarn": 2, "published": 8, "hadamard": 0, "rtn": 0}

_PRESET_PATTERN = re.compile(r"kvarn_k(?P<key_bits>[2348])v(?P<value_bits>[2348])_g(?P<tile_size>64|128)")

_PRESET_WIDTHS = ("k4v2", "k2v2", "k3v2", "k4v4", "k8v4")
PRESETS = tuple(f"kvarn_{widths}_g{tile}" for tile in (128, 64) for widths in _PRESET_WIDTHS)


@dataclass(frozen=True)
class KVarNConfig:
    """Validated, immutable settings of a :class:`~kvarn_hf.KVarNCache`.

    Parameters
    ----------
    key_bits, value_bits : int
        Bits per code, one of 2, 3, 4, 8.
    tile_size : int
        Tokens per tile, 64 or 128.
    sink_length : int
        How many of a sequence's first tokens stay dense for ever.
    residual_length : int
        How many of the newest tokens stay dense at least. Removing up to this many tokens is bit-exact.
    method : str
        ``"kvarn"`` (improved algorithm, the default), ``"published"`` (Algorithm 1 of arXiv:2606.03458, with its clamps
        and best-state tracking), ``"hadamard"`` (rotation and rounding) or ``"rtn"`` (rounding alone, keys per channel
        and values per token as in KIVI).
    iterations : int, optional
        Rounds of variance normalization; None takes the method's own (2 for "kvarn", 8 for "published").
    check_finite : bool
        Raise ``ValueError`` when a new key or value is NaN or infinite. Costs one device synchronization per update.

    Raises
    ------
    ValueError
        If a field is out of range; the message names the field, its value and what is allowed.
    """

    key_bits: int = 4
    value_bits: int = 2
    tile_size: int = 128
    sink_length: int = 128
    residual_length: int = 128
    method: str = "kvarn"
    iterations: int = None  # type: ignore[assignment]  # __post_init__ puts the method's own
    check_finite: bool = False

    def __post_init__(self) -> None:
        _require("key_bits", self.key_bits, BIT_WIDTHS)
        _require("value_bits", self.value_bits, BIT_WIDTHS)
        _require("tile_size", self.tile_size, TILE_SIZES)
        _require("method", self.method, METHODS)
        for name in ("sink_length", "residual_length"):
            object.__setattr__(self, name, whole(name, getattr(self, name), least=0))
        if self.iterations is None:
            object.__setattr__(self, "iterations", _DEFAULT_ITERATIONS[self.method])
        object.__setattr__(self, "iterations", whole("iterations", self.iterations, least=0, most=64))
        if not isinstance(self.check_finite, bool):
            raise ValueError(f"check_finite must be True or False, got {self.check_finite!r}")

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> KVarNConfig:
        """Build the settings a preset name stands for, e.g. ``kvarn_k4v2_g128``.

        Parameters
        ----------
        name : str
            ``kvarn_k<key_bits>v<value_bits>_g<tile_size>``; :data:`PRESETS` lists the recommended ones.
        **overrides
            Fields that replace those of the preset.

        Raises
        ------
        ValueError
            If the name does not have that form.
        """
        match = _PRESET_PATTERN.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}")
        return cls(**{name: int(number) for name, number in match.groupdict().items()} | overrides)

    @property
    def name(self) -> str:
        """The preset name of these widths, with the method in front when it is not "kvarn"."""
        return f"{self.method}_k{self.key_bits}v{self.value_bits}_g{self.tile_size}"

    def packed_tiles(self, length: int) -> int:
        """How many whole tiles are packed once ``length`` tokens are held."""
        return max(0, (length - self.sink_length - self.residual_length) // self.tile_size)

    def key_tile_bytes(self, head_dim: int) -> int:
        """Bytes of one packed key tile: codes, and in float16 scale and zero point per channel, scale per token."""
        return self.tile_size * head_dim * self.key_bits // 8 + 2 * (2 * head_dim + self.tile_size)

    def value_tile_bytes(self, head_dim: int) -> int:
        """Bytes of one packed value tile: codes, and in float16 scale and zero point per token, scale per channel."""
        return self.tile_size * head_dim * self.value_bits // 8 + 2 * (head_dim + 2 * self.tile_size)

    def bits_per_element(self, key_dim: int, value_dim: int | None = None) -> float:
        """Mean stored bits per packed key or value element, scales and zero points included."""
        value_dim = key_dim if value_dim is None else value_dim
        tile_bytes = self.key_tile_bytes(key_dim) + self.value_tile_bytes(value_dim)
        return 8 * tile_bytes / (self.tile_size * (key_dim + value_dim))

    def replace(self, **changes: Any) -> KVarNConfig:
        """A copy with some fields changed. Changing ``method`` alone takes the new method's own ``iterations``."""
        if "method" in changes and "iterations" not in changes:
            changes["iterations"] = None
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values: ``KVarNConfig(**config.to_dict()) == config``."""
        return asdict(self)


def _require(name: str, value: object, allowed: tuple[Any, ...]) -> None:
    # `type` and not `isinstance`: True == 1 must not pass for a width.
    if type(value) is not type(allowed[0]) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")
