"""Products with matrices in groups of integers."""
