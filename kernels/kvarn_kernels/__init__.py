"""Triton kernels of KVarN. They take and return tensors, numbers and bundles of them, and know nothing of
transformers."""

from kvarn_kernels.bundles import Held, Packed, Run, Scheme, Step
from kvarn_kernels.dequantize import dequantize_tiles
from kvarn_kernels.quantize import quantize_tiles

__all__ = ["Held", "Packed", "Run", "Scheme", "Step", "dequantize_tiles", "quantize_tiles"]
