"""Models for transformers: a folder that it loads where lmlong is not installed."""
