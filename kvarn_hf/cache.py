"""The cache that is passed to ``generate()``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
    StaticCache,
    StaticLayer,
)

from kvarn_hf import file as serialization
from kvarn_hf.checks import whole
from kvarn_hf.config import KVarNConfig
from kvarn_hf.layers.fixed import Progress, StaticDenseLayer, StaticKVarNLayer, traced_update
from kvarn_hf.layers.growing import KVarNLayer
from kvarn_hf.layers.lazy import reads_lazily
from kvarn_hf.monitor.log import Monitor, Queue, TileLog
from kvarn_hf.monitor.report import Report, warn

_STATIC = StaticKVarNLayer, StaticLayer
_TOGETHER = ()  # what is remembered of a layer whose steps Progress takes back, in all layers at once


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
        self.kvarn = kvarn if isinstance(kvarn, KVarNConfig) else KVarNConfig.from_preset(kvarn)
        if not isinstance(fused, bool):
            raise ValueError(f"fused must be True or False, got {fused!r}")
        self.fused = fused
        self.monitor = Monitor.of(monitor)
        self.unseen = Queue()  # what the monitor has yet to look at
        self._latent_dims: tuple[int, int] | None = None
        layers: Any = None
        self.static_length = max_cache_len
        if max_cache_len is not None:
            _check_static(max_cache_len, config, self.kvarn, self.monitor, fused)
        decoder = None
        if config is not None:
            decoder = config.get_text_config(decoder=True)
            rank, rotary = getattr(decoder, "kv_lora_rank", None), getattr(decoder, "qk_rope_head_dim", None)
            self._latent_dims = (rank, rotary) if rank and rotary else None
            if max_cache_len is None:
                layers = DynamicCache(config=config).layers
            else:
                layers = StaticCache(config=config, max_cache_len=max_cache_len).layers
        self.skip_layers = _skipped(skip_layers, None if layers is None else len(layers))
        served = None if max_cache_len is None else decoder
        self._progress = progress = Progress(len(layers or ()), max_cache_len, served)
        if layers is None:
            Cache.__init__(self, layer_class_to_replicate=KVarNLayer)
        else:

            def replacement(index: int, layer: Any) -> Any:
                skipped = index in self.skip_layers
                if type(layer) is DynamicLayer:
                    return layer if skipped else self._new_layer()
                if type(layer) is not StaticLayer or max_cache_len is None:
                    return layer
                if skipped:
                    return StaticDenseLayer(max_cache_len)
                return StaticKVarNLayer(self.kvarn, self._latent_dims, index, progress)

            Cache.__init__(self, layers=[replacement(i, layer) for i, layer in enumerate(layers)])
        # Of static layers, whose answers never change, what compiled code would else ask each at every step: one text
        # is compared sooner.
        self._windows: str | None = None
        if max_cache_len is not None and all(isinstance(layer, _STATIC) for layer in self.layers):
            self._windows = "".join("01"[layer.is_sliding] for layer in self.layers)
        # What the layers updated so far in this forward pass held before it; see update().
        self._before: list[tuple[int, Any]] = []
        self._last_layer = -1

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
        """Append tokens to layer ``layer_idx`` and return all its keys and values; see :meth:`KVarNLayer.update`.

        If it fails (out of memory, an interrupt, bad input), the layers already updated in the same forward pass are
        taken back too: the cache holds the tokens it held, in every layer, and can be used.
        """
        if self.static_length is not None and torch.compiler.is_compiling():
            traced: Any = self.layers[layer_idx]
            if not isinstance(traced, StaticKVarNLayer):
                return traced.update(key_states, value_states, *args, **kwargs)
            if key_states.shape[2] == 1 and traced.form is not None:
                return traced_update(traced, self._progress, layer_idx, key_states, value_states)
            return self._update_uncompiled(key_states, value_states, layer_idx, *args, **kwargs)
        while len(self.layers) <= layer_idx:
            self._windows = None
            new = DynamicLayer() if len(self.layers) in self.skip_layers else self._new_layer()
            self.layers.append(new)
        self._begin_pass(layer_idx)
        layer: Any = self.layers[layer_idx]
        steps = isinstance(layer, StaticKVarNLayer) and layer.steps(key_states.shape[2])
        self._before.append((layer_idx, _TOGETHER if steps else _remember(layer)))
        if isinstance(layer, StaticLayer):
            _make_fit(layer, key_states)
        if isinstance(layer, KVarNLayer):
            lazy = self.fused and not torch.compiler.is_compiling()
            kwargs["lazy"] = lazy and _caller_can_read_lazily(sys._getframe(1))
        try:
            states = layer.update(key_states, value_states, *args, **kwargs)
            if layer_idx == self._last_layer:
                self.unseen.settle()
        except BaseException:
            self.unseen.clear()
            for index, held in self._before:
                _restore(self.layers[index], held)
            self._before.clear()
            self._progress.take_back()
            raise
        if layer_idx == self._last_layer:
            self._before.clear()
        return states

    def memory_footprint(self) -> int:
        """Bytes of all storage the cache keeps alive, in every layer, unused capacity included."""
        return sum(_bytes(layer) for layer in self.layers)

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
        quantized = [layer for layer in self.layers if isinstance(layer, KVarNLayer)]
        state = next((layer.state for layer in quantized if layer.state is not None), None)
        count = 0 if state is None else state.count
        length = 0 if state is None else state.length
        sink = min(length, self.kvarn.sink_length)
        dense = sum(layer.dense_bytes() if isinstance(layer, KVarNLayer) else _bytes(layer) for layer in self.layers)
        held = self.memory_footprint()
        return {
            "preset": self.kvarn.name,
            "layers": len(self.layers),
            "quantized_layers": len(quantized),
            "tokens": length,
            "sink_tokens": sink,
            "packed_tokens": count * self.kvarn.tile_size,
            "tail_tokens": length - sink - count * self.kvarn.tile_size,
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
        # The only layers that can refuse are asked first.
        cropped = [(layer, layer.cropped(tokens_to_remove)) for layer in self.layers if isinstance(layer, KVarNLayer)]
        stock: list[Any] = [layer for layer in self.layers if not isinstance(layer, KVarNLayer)]
        for layer in stock:
            if isinstance(layer, StaticLayer) and tokens_to_remove:
                _check_croppable(layer)
        for layer in stock:
            layer.crop(tokens_to_remove)
        for quantized, state in cropped:
            quantized.state = state

    def reset(self) -> None:
        """Forget everything; the cache is as new."""
        for layer in self.layers:
            layer.reset()
            # Transformers 5.17 zeroes these instead of emptying them.
            if isinstance(layer, DynamicLayer) and not isinstance(layer, KVarNLayer):
                layer.keys = layer.values = None
                layer.is_initialized = False
        self._before.clear()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row ``repeats`` times, at least once."""
        repeats = whole("repeats", repeats, least=1)
        for layer in self.layers:
            if isinstance(layer, StaticLayer):
                _select_rows(layer, torch.arange(layer.keys.shape[0]).repeat_interleave(repeats))
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
                _select_rows(layer, torch.arange(layer.keys.shape[0])[torch.as_tensor(indices, device="cpu")])
            else:
                layer.batch_select_indices(indices)

    def save(self, path: str | Path) -> None:
        """Write the cache to one safetensors file: packed tiles as they are, plus a header.

        Raises
        ------
        ValueError
            If a layer is of a kind that cannot be saved (linear attention; with ``max_cache_len``, windows too).
        """
        serialization.save(self, path)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> KVarNCache:
        """Read a cache that :meth:`save` wrote; on the device it was saved from, generation continues bit-equal.

        Raises
        ------
        ValueError
            If the file is not one of this cache's.
        """
        return serialization.load(cls, path, device)

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

    def _begin_pass(self, layer_idx: int) -> None:
        # Which layer ends a forward pass is known once the second one begins.
        if self._before and layer_idx <= self._before[-1][0]:
            self._last_layer = max(self._last_layer, self._before[-1][0])
            self._before.clear()
            self.unseen.settle()
        if not self._before:
            self._progress.begun.clear()

    def _remember_linear(self, layer_idx: int) -> None:
        # Called for each of the layer's states; the first call sees all of them as they were.
        if torch.compiler.is_compiling() and self.static_length is not None:
            return
        if not self._before or self._before[-1][0] != layer_idx:
            self._begin_pass(layer_idx)
            self._before.append((layer_idx, _remember(self.layers[layer_idx])))

    def _check_rows(self, indices: torch.Tensor | Sequence[int]) -> None:
        layer: Any = next((x for x in self.layers if isinstance(x, KVarNLayer) and x.is_initialized), None)
        wanted = torch.as_tensor(indices)
        if layer is None or wanted.is_cuda:  # asking the GPU would wait for it
            return
        if wanted.is_floating_point():
            raise ValueError(f"indices must hold integers, got {wanted.tolist()}")
        rows = layer.batch
        if wanted.dtype != torch.bool and not all(-rows <= index < rows for index in wanted.flatten().tolist()):
            raise ValueError(f"indices must hold rows from {-rows} to {rows - 1}, got {wanted.tolist()}")

    def _new_layer(self) -> KVarNLayer:
        return KVarNLayer(self.kvarn, self._latent_dims, self.new_log())

    def new_log(self) -> TileLog | None:
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
        raise ValueError(f"monitor must be False with max_cache_len, whose steps nobody watches, got {monitor!r}")
    if kvarn.check_finite:
        raise ValueError("check_finite must be False with max_cache_len, whose steps nobody watches, got True")
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


def _caller_can_read_lazily(caller: FrameType) -> bool:
    """Whether the module that calls ``update()`` hands keys to an attention that knows, or at least touches, lazy
    tensors.

    A cache is told nothing about the model it serves, and one attention implementation (flex) compiles code around
    the tensors it gets. The module's own config is the only place that says which one it will call.
    """
    config = getattr(caller.f_locals.get("self"), "config", None)
    return getattr(config, "_attn_implementation", None) in reads_lazily


def _bytes(layer: Any) -> int:
    if isinstance(layer, KVarNLayer):
        return layer.memory_footprint()
    tensors = tensors_in(vars(layer).values())
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}.values())


def tensors_in(items: Iterable[Any]) -> list[torch.Tensor]:
    """Every tensor among ``items``, and in the lists, tuples and dicts among them."""
    tensors: list[torch.Tensor] = []
    pending = list(items)
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            tensors.append(item)
        elif isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, (list, tuple)):
            pending.extend(item)
    return tensors


def _check_croppable(layer: Any) -> None:
    if not hasattr(layer, "crop") or (layer.is_sliding and layer.get_seq_length() > layer.max_cache_len):
        raise ValueError(
            f"max_cache_len must be None to crop this cache: a {type(layer).__name__} does not keep what it drops"
        )


def _select_rows(layer: StaticLayer, rows: torch.Tensor) -> None:
    """What Transformers' static layers lack, for any choice of batch rows."""
    layer.reorder_cache(rows.to(layer.keys.device))


def _make_fit(layer: StaticLayer, keys: torch.Tensor) -> None:
    """Let an empty layer of Transformers' allocate its storage again, if the tokens are not like those of before."""
    if layer.is_initialized and not torch.compiler.is_compiling():
        like = (layer.keys.shape[:2], layer.keys.dtype, layer.keys.device)
        if like != (keys.shape[:2], keys.dtype, keys.device) and not layer.get_seq_length():
            layer.is_initialized = False


def _remember(layer: Any) -> Any:
    """What :func:`_restore` needs to undo one update, without keeping the memory that the update frees."""
    if isinstance(layer, KVarNLayer):
        return layer.remember()
    if type(layer) is DynamicLayer:
        return layer.get_seq_length()
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return _copied(vars(layer))  # it writes its states in place
    if isinstance(layer, StaticLayer):
        # So does this one, but behind the tokens it holds, unless a window moves.
        return _copied({k: v for k, v in vars(layer).items() if layer.is_sliding or k not in ("keys", "values")})
    return vars(layer).copy()


def _copied(item: Any) -> Any:
    if isinstance(item, dict):
        return {name: _copied(value) for name, value in item.items()}
    return item.detach().clone() if isinstance(item, torch.Tensor) else item


def _restore(layer: Any, held: Any) -> None:
    if held == _TOGETHER:
        layer.changes[0] += 1  # what it has handed out is of a step that is no more
        return
    if isinstance(layer, KVarNLayer):
        layer.restore(held)
    elif type(layer) is DynamicLayer:
        if held < layer.get_seq_length():
            layer.crop(held - layer.get_seq_length())
    elif isinstance(layer, StaticLayer):
        for name, value in held.items():
            current = getattr(layer, name)
            if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
                current.copy_(value)  # compiled steps rely on its address
            else:
                setattr(layer, name, value)
    else:
        vars(layer).update(held)
