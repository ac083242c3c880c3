"""Transformers' cache layers: growing and of fixed size."""
