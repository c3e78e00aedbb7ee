"""Export models for transformers."""
