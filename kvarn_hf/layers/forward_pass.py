"""One forward pass through a cache: what its layers held before, so that a pass that fails leaves nothing behind."""

from __future__ import annotations

from typing import Any

from kvarn_hf.layers import stock
from kvarn_hf.layers.fixed import StaticKVarNLayer
from kvarn_hf.layers.packed import PackedLayer
from kvarn_hf.layers.step import SharedStep

_SHARED = ()  # remembered of a layer whose step SharedStep takes back, in all layers at once


class ForwardPass:
    """The updates of the pass that goes on.

    Parameters
    ----------
    layers : list
        The cache's, which may grow.
    shared : SharedStep
        What its fixed layers share.
    """

    def __init__(self, layers: list[Any], shared: SharedStep) -> None:
        self.layers, self.shared = layers, shared
        self.before: list[tuple[int, Any]] = []  # in the order of the updates
        self.last_layer = -1  # the one that ends a pass, as far as passes so far have shown

    def begin(self, layer_idx: int) -> bool:
        """Begin a pass if this layer's update does not belong to the one that goes on; whether one has ended."""
        ended = bool(self.before) and layer_idx <= self.before[-1][0]
        if ended:
            self.last_layer = max(self.last_layer, self.before[-1][0])
            self.before.clear()
        if not self.before:
            self.shared.begun.clear()
        return ended

    def remember(self, layer_idx: int, tokens: int) -> None:
        """Note what a layer holds before it is given so many tokens."""
        layer = self.layers[layer_idx]
        if isinstance(layer, StaticKVarNLayer) and layer.steps(tokens):
            held: Any = _SHARED
        else:
            held = layer.remember() if isinstance(layer, PackedLayer) else stock.remember(layer)
        self.before.append((layer_idx, held))

    def remember_linear(self, layer_idx: int) -> None:
        """The same for a layer's recurrent states, of which the first update sees all as they were."""
        if not self.before or self.before[-1][0] != layer_idx:
            self.begin(layer_idx)
            self.before.append((layer_idx, stock.remember(self.layers[layer_idx])))

    def end(self, layer_idx: int) -> None:
        """Forget what layers held before, if this layer's update ends the pass."""
        if layer_idx == self.last_layer:
            self.before.clear()

    def take_back(self) -> None:
        """Undo every update of this pass."""
        for index, held in self.before:
            layer = self.layers[index]
            if held == _SHARED:
                layer.changes[0] += 1  # what it has handed out is of a step that is no more
            elif isinstance(layer, PackedLayer):
                layer.restore(held)
            else:
                stock.restore(layer, held)
        self.before.clear()
        self.shared.take_back()
