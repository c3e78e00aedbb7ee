"""Training: the only package that imports lightning and deepspeed."""
