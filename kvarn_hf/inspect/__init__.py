"""Judges a model's layers for quantization: ``kvarn inspect``."""
