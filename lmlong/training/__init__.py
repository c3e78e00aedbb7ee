"""Training: the only place that knows lightning and deepspeed."""
