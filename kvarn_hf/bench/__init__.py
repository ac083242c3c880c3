"""Measures on this machine's GPU: ``kvarn bench``."""
