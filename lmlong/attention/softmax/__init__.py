"""Exact softmax attention over the whole document."""
