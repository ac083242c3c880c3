"""The cache that is passed to ``generate()``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticCache, StaticLayer

from kvarn_hf import file
from kvarn_hf.checks import whole
from kvarn_hf.config import KVarNConfig
from kvarn_hf.layers import stock
from kvarn_hf.layers.fixed import StaticDenseLayer, StaticKVarNLayer, traced_update
from kvarn_hf.layers.forward_pass import ForwardPass
from kvarn_hf.layers.growing import KVarNLayer
from kvarn_hf.layers.packed import PackedLayer
from kvarn_hf.layers.reading import reads_lazily
from kvarn_hf.layers.step import SharedStep
from kvarn_hf.monitor.log import Monitor, Queue, TileLog
from kvarn_hf.monitor.report import Report, warn

_STATIC = StaticKVarNLayer, StaticLayer


class KVarNCache(DynamicCache):
    """A KV cache four to five times smaller, for any decoder::

        model.generate(**inputs, past_key_values=KVarNCache())

    Parameters
    ----------
    config : PreTrainedConfig, optional
        The model's config. With it, only full-attention layers are quantized, and sliding-window, chunked and
        linear-attention layers are stored as Transformers stores them. Without it, every layer is taken for full
        attention, which is right for most decoders and wrong for those with linear attention.
    kvarn : str or KVarNConfig
        A preset name such as ``kvarn_k4v2_g128`` (the default), or settings.
    skip_layers : iterable of int
        Layers that stay dense. Negative ones count from the end (needs ``config``).
    fused : bool
        Let decode steps read packed tiles directly where the model's attention allows it ("sdpa" and "kvarn").
        False: always dequantize.
    monitor : bool, int or Monitor
        Note how well tiles are quantized, for :meth:`report`: every tile, every n-th, or as a
        :class:`~kvarn_hf.Monitor` says. What the cache stores stays the same.
    max_cache_len : int, optional
        Allocate everything once, for so many tokens, prompt and answer together: ``generate()`` then compiles the
        decode step, as it does for Transformers' ``StaticCache``. Needs ``config``, the model's own, and any attention
        but flash attention.

    Raises
    ------
    ValueError
        If an argument is out of range; the message names it, its value and what is allowed.

    Notes
    -----
    KVarN: arXiv:2606.03458. The stored state is a function of the tokens alone: one prefill, chunks or single tokens
    give the same codes, scales and bytes. A tile is quantized once, from the original values.
    """

    def __init__(
        self,
        config: PreTrainedConfig | None = None,
        kvarn: str | KVarNConfig = "kvarn_k4v2_g128",
        *,
        skip_layers: Iterable[int] = (),
        fused: bool = True,
        monitor: bool | int | Monitor = False,
        max_cache_len: int | None = None,
    ) -> None:
        if config is not None and not isinstance(config, PreTrainedConfig):
            raise ValueError(f"config must be a model's config (pass settings as kvarn=...), got {config!r}")
        if not isinstance(fused, bool):
            raise ValueError(f"fused must be True or False, got {fused!r}")
        self.kvarn = kvarn if isinstance(kvarn, KVarNConfig) else KVarNConfig.from_preset(kvarn)
        self.fused, self.monitor, self.static_length = fused, Monitor.of(monitor), max_cache_len
        self.unseen = Queue()  # what the monitor has yet to look at
        if max_cache_len is not None:
            _check_static(max_cache_len, config, self.kvarn, self.monitor, fused)
        decoder = None if config is None else config.get_text_config(decoder=True)
        self._latent_dims = _latent_dims(decoder)
        stock_layers = _stock_layers(config, max_cache_len)
        self.skip_layers = _skipped(skip_layers, None if config is None else len(stock_layers))
        served = None if max_cache_len is None else decoder
        self._shared = SharedStep(len(stock_layers), max_cache_len, served)
        if config is None:
            Cache.__init__(self, layer_class_to_replicate=KVarNLayer)
        else:
            Cache.__init__(self, layers=[self._replaced(i, layer) for i, layer in enumerate(stock_layers)])
        self._pass = ForwardPass(self.layers, self._shared)
        # Of static layers, whose answers never change: one guard in compiled code instead of one per layer.
        self._windows: str | None = None
        if max_cache_len is not None and all(isinstance(layer, _STATIC) for layer in self.layers):
            self._windows = "".join("01"[layer.is_sliding] for layer in self.layers)

    def _replaced(self, index: int, layer: Any) -> Any:
        """What takes the place of a layer of Transformers'."""
        skipped = index in self.skip_layers
        if type(layer) is DynamicLayer and not skipped:
            return self._new_layer()
        if type(layer) is StaticLayer and self.static_length is not None:
            if skipped:
                return StaticDenseLayer(self.static_length)
            return StaticKVarNLayer(self.kvarn, self._latent_dims, index, self._shared)
        return layer

    @property
    def is_compileable(self) -> bool:
        """Whether ``generate()`` may compile decode steps."""
        return self._windows is not None or bool(self.layers and all(layer.is_compileable for layer in self.layers))

    @property
    def is_sliding(self) -> list[bool]:
        """Which layers see a window only."""
        if self._windows is not None:
            return [window == "1" for window in self._windows]
        # Not super()'s, which not every compiler of torch's can trace.
        return [getattr(layer, "is_sliding", False) for layer in self.layers]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens to layer ``layer_idx`` and return all its keys and values; see :meth:`PackedLayer.update`.

        If it fails (out of memory, an interrupt, bad input), the layers already updated in the same forward pass are
        taken back too: the cache holds the tokens it held, in every layer, and can be used.
        """
        if self.static_length is not None and torch.compiler.is_compiling():
            return self._traced_update(key_states, value_states, layer_idx, *args, **kwargs)
        while len(self.layers) <= layer_idx:
            self._windows = None
            self.layers.append(DynamicLayer() if len(self.layers) in self.skip_layers else self._new_layer())
        if self._pass.begin(layer_idx):
            self.unseen.settle()
        layer: Any = self.layers[layer_idx]
        self._pass.remember(layer_idx, key_states.shape[2])
        if isinstance(layer, StaticLayer):
            stock.make_fit(layer, key_states)
        if isinstance(layer, PackedLayer):
            # A cache is told nothing about the model it serves, and not every attention takes lazy tensors (flex
            # compiles code around those it gets). Which one it will call, only the calling module's config says:
            # a config given to the cache may be a copy that was loaded apart from the model.
            caller = sys._getframe(1).f_locals.get("self")
            lazy = self.fused and not torch.compiler.is_compiling()
            kwargs["lazy"] = lazy and reads_lazily(getattr(caller, "config", None))
        try:
            states = layer.update(key_states, value_states, *args, **kwargs)
            if layer_idx == self._pass.last_layer:
                self.unseen.settle()
        except BaseException:
            self.unseen.clear()
            self._pass.take_back()
            raise
        self._pass.end(layer_idx)
        return states  # type: ignore[no-any-return]

    def _traced_update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer: Any = self.layers[layer_idx]
        if not isinstance(layer, StaticKVarNLayer):
            return layer.update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]
        if key_states.shape[2] == 1 and layer.held_layout is not None:
            return traced_update(layer, self._shared, layer_idx, key_states, value_states)
        return self._update_uncompiled(key_states, value_states, layer_idx, *args, **kwargs)

    def memory_footprint(self) -> int:
        """Bytes of all storage the cache keeps alive, in every layer, unused capacity included."""
        return sum(
            layer.memory_footprint() if isinstance(layer, PackedLayer) else stock.layer_bytes(layer)
            for layer in self.layers
        )

    def report(self) -> Report:
        """Tokens, layers, regions and bytes, and what the monitor saw: a dictionary that prints as a table.

        Warns of tiles that were hard to normalize or are much worse than their layer's others, once each: figures stay
        on the device until somebody asks, so that no step waits for them.
        """
        seen = []
        for index, layer in enumerate(self.layers):
            if isinstance(layer, KVarNLayer) and layer.log is not None and layer.state is not None:
                figures = layer.log.held(layer.state.count)
                if figures is not None:
                    warn(layer.log, index, layer.state.config, figures)
                    seen.append((index, layer.state.config, figures))
        return Report(self._summary(), self.monitor, seen)

    def _summary(self) -> dict[str, Any]:
        quantized = [layer for layer in self.layers if isinstance(layer, PackedLayer)]
        on_device = self._shared.lengths()
        lengths = (on_device[x.index] if isinstance(x, StaticKVarNLayer) else x.lengths() for x in quantized)
        length, count = next((held for held in lengths if held[0]), (0, 0))
        count = max(count, self.kvarn.packed_tiles(length))  # the next step of a fixed layer packs what is due
        sink, packed = min(length, self.kvarn.sink_length), count * self.kvarn.tile_size
        dense = sum(
            layer.token_bytes * length if isinstance(layer, PackedLayer) else stock.layer_bytes(layer)
            for layer in self.layers
        )
        held = self.memory_footprint()
        return {
            "preset": self.kvarn.name,
            "layers": len(self.layers),
            "quantized_layers": len(quantized),
            "tokens": length,
            "sink_tokens": sink,
            "packed_tokens": packed,
            "tail_tokens": length - sink - packed,
            "tiles": count,
            "bytes": held,
            "dense_bytes": dense,
            "ratio": dense / held if held and length else 1.0,
            "reads": {kind: sum(layer.reads[kind] for layer in quantized) for kind in ("fused", "dequantized")},
        }

    def __repr__(self) -> str:
        r = self._summary()
        return (
            f"{type(self).__name__}({r['preset']}, {r['quantized_layers']} of {r['layers']} layers quantized, "
            f"{r['tokens']} tokens = {r['sink_tokens']} sink + {r['packed_tokens']} packed + {r['tail_tokens']} tail, "
            f"{r['bytes'] / 2**20:.2f} MiB, {r['ratio']:.2f}x smaller than dense)"
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens from every layer, or from none.

        Parameters
        ----------
        tokens_to_remove : int
            Zero or negative: how many to remove. Positive: the length to keep.

        Raises
        ------
        ValueError
            If the cut would go through a packed tile; the message names the lengths that are allowed. Removing up to
            ``residual_length`` of the tokens that were ever held (in one cut or in several) always works and is
            bit-exact. With ``max_cache_len``, also if a window layer has dropped tokens.
        """
        tokens_to_remove = whole("tokens_to_remove", tokens_to_remove)
        if tokens_to_remove > 0:
            length = int(self.get_seq_length())
            if tokens_to_remove >= length:
                return
            tokens_to_remove -= length
        # All that can fail comes first: every layer is changed, or none.
        packed = [(layer, layer.cropped(tokens_to_remove)) for layer in self.layers if isinstance(layer, PackedLayer)]
        others: list[Any] = [layer for layer in self.layers if not isinstance(layer, PackedLayer)]
        for layer in others:
            if isinstance(layer, StaticLayer) and tokens_to_remove:
                stock.check_croppable(layer)
        for layer in others:
            layer.crop(tokens_to_remove)
        for quantized, state in packed:
            if state is not None:
                quantized.replace(state)

    def reset(self) -> None:
        """Forget everything; the cache is as new."""
        for layer in self.layers:
            layer.reset() if isinstance(layer, PackedLayer) else stock.empty(layer)
        self._pass.before.clear()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row ``repeats`` times, at least once."""
        repeats = whole("repeats", repeats, least=1)
        for layer in self.layers:
            if isinstance(layer, StaticLayer):
                stock.select_rows(layer, torch.arange(layer.keys.shape[0]).repeat_interleave(repeats))
            else:
                layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor | Sequence[int]) -> None:
        """Keep only the batch rows ``indices``; a negative one counts from the last row.

        Raises
        ------
        ValueError
            If there is no such row.
        """
        self._check_rows(indices)
        for layer in self.layers:
            if isinstance(layer, StaticLayer):
                rows = torch.arange(layer.keys.shape[0])[torch.as_tensor(indices, device="cpu")]
                stock.select_rows(layer, rows)
            else:
                layer.batch_select_indices(indices)

    def save(self, path: str | Path) -> None:
        """Write the cache to one safetensors file: packed tiles as they are, plus a header.

        Raises
        ------
        ValueError
            If a layer is of a kind that cannot be saved (linear attention; with ``max_cache_len``, windows too).
        """
        header = {
            "kvarn": self.kvarn.to_dict(),
            "skip_layers": sorted(self.skip_layers),
            "latent_dims": self._latent_dims,
            "monitor": None if self.monitor is None else asdict(self.monitor),
            "from_config": self.layer_class_to_replicate is None,
        }
        file.save(path, self.layers, header)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> KVarNCache:
        """Read a cache that :meth:`save` wrote; on the device it was saved from, generation continues bit-equal.

        Raises
        ------
        ValueError
            If the file is not one of this cache's.
        """
        header, parts = file.load(path, device)
        monitor = Monitor(**header["monitor"]) if header.get("monitor") else False
        cache = cls(kvarn=KVarNConfig(**header["kvarn"]), skip_layers=header["skip_layers"], monitor=monitor)
        cache._latent_dims = tuple(header["latent_dims"]) if header["latent_dims"] else None
        entries = zip(header["layers"], parts, strict=True)
        cache.layers.extend(file.layer_from(entry, tensors, cache._new_log) for entry, tensors in entries)
        if header["from_config"]:
            cache.layer_class_to_replicate = None
        return cache

    def has_previous_state(self, layer_idx: int | None = None, *args: Any, **kwargs: Any) -> bool:
        """As in Transformers, for models with linear attention."""
        self._require_config()
        return super().has_previous_state(layer_idx, *args, **kwargs)

    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """As in Transformers, for models with linear attention."""
        self._require_config()
        return super().get_conv_state(layer_idx, *args, **kwargs)

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As in Transformers, for models with linear attention."""
        self._require_config()
        self._remember_linear(layer_idx)
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """As in Transformers, for models with linear attention."""
        self._require_config()
        self._remember_linear(layer_idx)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    @torch.compiler.disable(reason="only steps of one token can be compiled, behind a prompt")
    def _update_uncompiled(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.update(*args, **kwargs)

    def _remember_linear(self, layer_idx: int) -> None:
        if not (torch.compiler.is_compiling() and self.static_length is not None):
            self._pass.remember_linear(layer_idx)

    def _check_rows(self, indices: torch.Tensor | Sequence[int]) -> None:
        layer: Any = next((x for x in self.layers if isinstance(x, PackedLayer) and x.is_initialized), None)
        wanted = torch.as_tensor(indices)
        if layer is None or wanted.is_cuda:  # asking the GPU would wait for it
            return
        if wanted.is_floating_point():
            raise ValueError(f"indices must hold integers, got {wanted.tolist()}")
        rows = layer.batch
        if wanted.dtype != torch.bool and not all(-rows <= index < rows for index in wanted.flatten().tolist()):
            raise ValueError(f"indices must hold rows from {-rows} to {rows - 1}, got {wanted.tolist()}")

    def _new_layer(self) -> KVarNLayer:
        return KVarNLayer(self.kvarn, self._latent_dims, self._new_log())

    def _new_log(self) -> TileLog | None:
        """Notes for a layer of this cache, if it is monitored."""
        return None if self.monitor is None else TileLog(self.monitor, self.unseen)

    def _require_config(self) -> None:
        if self.layer_class_to_replicate is not None:
            raise ValueError(
                "This model has linear-attention layers, which a cache can only see in its config: "
                "build it with KVarNCache(config=model.config)."
            )


def _check_static(max_cache_len: int, config: Any, kvarn: KVarNConfig, monitor: Any, fused: bool) -> None:
    if type(max_cache_len) is not int or max_cache_len < 1:
        raise ValueError(f"max_cache_len must be a positive integer or None, got {max_cache_len!r}")
    if config is None:
        raise ValueError("max_cache_len needs the model's config: KVarNCache(model.config, max_cache_len=...)")
    if monitor is not None:
        raise ValueError(f"monitor must be False with max_cache_len: compiled steps do not support it; got {monitor!r}")
    if kvarn.check_finite:
        raise ValueError("check_finite must be False with max_cache_len: compiled steps do not support it; got True")
    if not fused:
        raise ValueError("fused must be True with max_cache_len, got False")


def _skipped(skip_layers: Iterable[int], count: int | None) -> frozenset[int]:
    if not isinstance(skip_layers, Iterable) or isinstance(skip_layers, str):
        raise ValueError(f"skip_layers must be a list of layers such as [0, -1], got {skip_layers!r}")
    indices = list(skip_layers)
    for i in indices:
        if type(i) is not int or (i < 0 if count is None else not -count <= i < count):
            allowed = ">= 0 when no config is given" if count is None else f"from {-count} to {count - 1}"
            raise ValueError(f"skip_layers must hold integers {allowed}, got {i!r}")
    return frozenset(i % count if count else i for i in indices)


def _stock_layers(config: PreTrainedConfig | None, max_cache_len: int | None) -> list[Any]:
    if config is None:
        return []
    if max_cache_len is None:
        return DynamicCache(config=config).layers
    return StaticCache(config=config, max_cache_len=max_cache_len).layers


def _latent_dims(decoder: Any) -> tuple[int, int] | None:
    """Of a model with multi-head latent attention: the latents' rank, and the channels of the keys' rotary part."""
    rank, rotary = getattr(decoder, "kv_lora_rank", None), getattr(decoder, "qk_rope_head_dim", None)
    return (rank, rotary) if rank and rotary else None
