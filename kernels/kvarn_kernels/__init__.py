"""Triton kernels of KVarN. They take and return tensors and numbers, and know nothing of transformers."""

from kvarn_kernels.dequantize import dequantize_tiles
from kvarn_kernels.quantize import quantize_tiles

__all__ = ["dequantize_tiles", "quantize_tiles"]
