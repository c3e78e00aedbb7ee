"""Inference with a trained model: loading, prefill and token-by-token generation from a state."""
