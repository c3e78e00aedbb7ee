"""Measurements of trained models: perplexity against length, probes, spectra and the laws of attention."""
