"""Causal language models for texts too long for softmax attention."""

__version__ = "0.1.0"
