"""Engines that continue rows of text with a model: native code, a CUDA graph, and torch."""
