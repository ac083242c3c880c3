"""A layer that grows with its tokens, behind the interface Transformers calls."""

from __future__ import annotations

from typing import Any

from kvarn_hf.config import KVarNConfig
from kvarn_hf.layers.packed import PackedLayer
from kvarn_hf.monitor.log import TileLog
from kvarn_hf.state.layer_state import LayerState


class KVarNLayer(PackedLayer):
    """Full-attention layer whose older tokens are packed; see :class:`~kvarn_hf.layers.packed.PackedLayer`."""

    def __init__(
        self, config: KVarNConfig, latent_dims: tuple[int, int] | None = None, log: TileLog | None = None
    ) -> None:
        self.state: LayerState | None = None
        super().__init__(config, latent_dims, log)

    def snapshot(self) -> LayerState | None:
        """What the layer holds, as a value; None before any token."""
        return self.state

    def replace(self, state: LayerState | None) -> None:
        """Hold this instead; None: nothing."""
        self.state = state

    @property
    def batch(self) -> int:
        """Rows of the tokens held."""
        return self._held().batch

    @property
    def token_bytes(self) -> int:
        """Bytes that a token of every row takes unquantized; 0 before any."""
        return 0 if self.state is None else self.state.token_bytes

    def lengths(self) -> tuple[int, int]:
        """Tokens held, and tiles packed."""
        return (0, 0) if self.state is None else (self.state.length, self.state.count)

    def get_seq_length(self) -> int:
        """Tokens held."""
        return 0 if self.state is None else self.state.length

    def get_max_length(self) -> int:
        """-1: there is no limit."""
        return -1

    def remember(self) -> Any:
        """What :meth:`restore` needs to undo the next update: everything but the tiles, and their number."""
        # Filled slots never change, so the arenas that the update leaves behind still hold the tiles of before. Holding
        # on to the old arenas would double the memory of every layer whose arenas grow in the same step.
        state = self.state
        return None if state is None else (state.config, state.dense, state.count, state.prescale, state.padding)

    def restore(self, held: Any) -> None:
        """Undo the updates since :meth:`remember`."""
        if held is None:
            self.reset()
        else:
            config, dense, count, prescale, padding = held
            self.state = LayerState(config, dense, self._held().tiles.truncated(count), prescale, padding)

    def offload(self) -> None:
        """Move to the CPU."""
        if self.state is not None:
            self.state = self.state.to("cpu")

    def prefetch(self) -> None:
        """Move back to the device the tokens came from."""
        if self.state is not None and self.state.device != self.device:
            self.state = self.state.to(self.device)
