"""What a cache will hold, from a model's config alone: no weights, no download, no tokens."""

from kvarn_hf.estimate.shapes import LayerShape, ModelShapes, load_config
from kvarn_hf.estimate.sizes import Estimate, LayerKind, estimate, most_rows, most_tokens
from kvarn_hf.estimate.table import show

__all__ = [
    "Estimate",
    "LayerKind",
    "LayerShape",
    "ModelShapes",
    "estimate",
    "load_config",
    "most_rows",
    "most_tokens",
    "show",
]
