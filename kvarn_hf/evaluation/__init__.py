"""Accuracy beside every competitor: ``kvarn eval`` and what it measures."""
