"""Causal attentions with one interface, and attentions for encoders with another."""
