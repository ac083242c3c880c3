"""Figures of the notebooks, of the README and of ``kvarn inspect``: functions that take data and return a Figure."""
