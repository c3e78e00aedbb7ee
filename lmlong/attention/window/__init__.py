"""Exact softmax attention over the last tokens."""
