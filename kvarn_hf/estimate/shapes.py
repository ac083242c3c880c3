"""What a model puts into its cache, found out by passing two tokens through it on torch's meta device.

Nothing here knows a model's shapes: on the meta device tensors have shapes and no data, so any model can be built and
run there in moments.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.cache_utils import DynamicCache, LinearAttentionCacheLayerMixin

from kvarn_hf.evaluation.blocks import cache_argument
from kvarn_hf.layers.stock import tensors_in
from kvarn_hf.models import torch_dtype


class LayerShape(NamedTuple):
    """What one row puts into one layer.

    ``heads`` keys of ``key_dim`` and values of ``value_dim`` channels per token (none if ``heads`` is 0), and
    ``linear_bytes`` of linear-attention states, however many tokens there are.
    """

    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    linear_bytes: int = 0

    def states(self, length: int, batch: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[batch, heads, length, head_dim]`` without data."""
        lead, dims = (batch, self.heads, length), (self.key_dim, self.value_dim)
        keys, values = (torch.empty(*lead, dim, dtype=dtype, device="meta") for dim in dims)
        return keys, values


@dataclass(frozen=True)
class ModelShapes:
    """What an estimate needs to know of a model: the dtype of weights and cache, how many parameters there are and what
    they take with the buffers, and what enters each layer. :meth:`probe` finds it out; takes the place of a config."""

    config: PreTrainedConfig
    dtype: torch.dtype
    parameters: int
    weight_bytes: int
    layers: tuple[LayerShape, ...]

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
        own = getattr(config.get_text_config(decoder=True), "dtype", None) or config.dtype or torch.bfloat16
        chosen = torch_dtype(own if dtype is None else dtype)
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
                model(input_ids=tokens, use_cache=True, **{cache_argument(model): cache})
        except Exception as error:  # of any model's own code
            raise ValueError(
                f"config of type {config.model_type!r} gives no decoder to estimate: {_first_line(error)}"
            ) from error
        parameters = sum(p.numel() for p in model.parameters())
        return cls(config, chosen, parameters, model.get_memory_footprint(), tuple(map(_shape, cache.layers)))

    @classmethod
    def of(cls, config: PreTrainedConfig | ModelShapes, dtype: torch.dtype | str | None) -> ModelShapes:
        """Shapes as they are, or those of a config.

        Raises
        ------
        ValueError
            As :meth:`probe`, or if the shapes were probed with another dtype.
        """
        if not isinstance(config, ModelShapes):
            return cls.probe(config, dtype)
        if dtype is not None and torch_dtype(dtype) != config.dtype:
            raise ValueError(f"dtype must be {config.dtype}, of which the model was probed, got {dtype}")
        return config


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


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of their storage; no two of a layer's tensors share one."""
    return sum(t.untyped_storage().nbytes() for t in tensors)


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


def _shape(layer: Any) -> LayerShape:
    """Of a stock layer that has seen one row of tokens."""
    if getattr(layer, "indexer_keys", None) is not None:
        raise ValueError("config must be of a model without sparse-attention indexers, whose layers are not estimated")
    linear = 0
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        linear = storage_bytes(tensors_in([layer.conv_states, layer.recurrent_states]))
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    # Layers that use another one's keys and values are never updated.
    if keys is None or values is None:
        return LayerShape(linear_bytes=linear)
    return LayerShape(keys.shape[1], keys.shape[3], values.shape[3], linear)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
