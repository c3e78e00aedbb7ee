"""The largest sizes of a recipe, beyond what any machine holds: a slip of a digit is told as a mistake of the recipe.
Sizes that are possible alone, and not together, are told by lmlong/model/memory.py."""

UNSAID = 1 << 16
"""Limits from here on are told only to those who go beyond them."""
WIDTH = 1 << 17
FEATURES = 1 << 20
TOKENS = 1 << 31
"""Of a sequence, a window or a segment."""
ROWS = 1 << 20
"""Of a batch, or of those that are added to one."""
COUNT = 1 << 53
"""Of steps, tokens or bytes."""
VOCABULARY = 1 << 24
PROCESSES = 1 << 17
FACTOR = 1e30
"""Of a learning rate, a norm or a weight: float32 holds no more than 3e38."""
