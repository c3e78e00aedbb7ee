"""Bidirectional attentions, for encoders."""
