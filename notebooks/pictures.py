"""Make the README's pictures, from a real tile of SmolLM2 and from the config of a large model.

python notebooks/pictures.py
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import DynamicCache, LlamaConfig

from kvarn_hf import KVarNConfig
from kvarn_hf.bench.generate import SHAPES
from kvarn_hf.demo import default_prompt
from kvarn_hf.estimate import ModelShapes, estimate
from kvarn_hf.method.normalize import variance_normalize
from kvarn_hf.method.packing import unpack_keys
from kvarn_hf.method.quantize import key_prescale, quantize_keys
from kvarn_hf.method.rotation import rotate
from kvarn_hf.models import load_model
from kvarn_hf.plotting import memory, tiles

FOLDER = Path(__file__).parent / "pictures"
LAYER, HEAD = 9, 2


def method() -> Any:
    """Where a layer's tokens are, and one tile's way through the stages."""
    model, tokenizer = load_model(dtype="float32", device="cpu")
    ids = tokenizer(default_prompt(), return_tensors="pt").input_ids[:, :256]
    cache: Any = DynamicCache(config=model.config)
    model.generate(ids, max_new_tokens=1, do_sample=False, past_key_values=cache)
    tile = cache.layers[LAYER].keys[0, HEAD, 128:]
    config = KVarNConfig()
    prescale = key_prescale(tile)
    rotated = rotate(tile * prescale)
    normalized = rotated / variance_normalize(rotated.mT, config.iterations).mT
    normalized = normalized / normalized.std(0, correction=0)
    codes = unpack_keys(quantize_keys(tile, prescale, config).codes, config.key_bits)
    panels = [
        ("keys of one tile", _spread(tile), tile),
        ("pre-scale, rotate", _spread(rotated), rotated),
        ("normalize", _spread(normalized), normalized),
        ("round", f"{config.key_bits}-bit codes, and\nthree short vectors", codes),
    ]
    return tiles.glance(panels, (128, 4, 192), config.tile_size)


def _spread(tile: torch.Tensor) -> str:
    """The largest deviation over the smallest, of channels and of tokens."""
    channels, tokens = ((std.max() / std.min()).item() for std in (tile.std(0), tile.std(1)))
    return f"largest / smallest deviation:\nchannels {channels:.1f}, tokens {tokens:.1f}"


def growth() -> Any:
    """What a cache takes as a conversation grows, beside what is free on a GPU."""
    shapes = ModelShapes.probe(LlamaConfig(**SHAPES["llama-3.1-8b"]), "bfloat16")
    contexts = [16384 * i for i in range(1, 9)]
    sizes = {"dense": [estimate(shapes, n).dense_bytes for n in contexts]}
    for preset in ("kvarn_k4v2_g128", "kvarn_k2v2_g128"):
        sizes[preset] = [estimate(shapes, n, 1, preset).bytes for n in contexts]
    free = int(0.9 * 24 * 2**30) - shapes.weight_bytes
    return memory.bytes_by_context(contexts, sizes, {"free beside Llama-3.1-8B's weights on a GPU of 24 GiB": free})


def save(figure: Any, name: str) -> None:
    """As a PNG with 256 colours."""
    FOLDER.mkdir(exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=130, bbox_inches="tight")
    file = FOLDER / f"{name}.png"
    Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(file, optimize=True)
    print(f"{file.name}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    save(method(), "method")
    save(growth(), "memory")
