"""Export models for transformers, which loads them without lmlong."""
