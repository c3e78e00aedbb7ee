"""Upper limits of numbers in a recipe, larger than any machine can handle, so that a typo is reported.

lmlong/model/build.py refuses sizes that are valid by themselves but too large together.
"""

LARGEST_SHOWN = 1 << 16
"""Larger limits are shown only in the message for a value that exceeds them."""
WIDTH = 1 << 17
FEATURES = 1 << 20
TOKENS = 1 << 31
"""For sequences, windows and segments."""
ROWS = 1 << 20
"""For batches, and forward passes accumulated for one step."""
COUNT = 1 << 53
"""For steps, tokens and bytes."""
VOCABULARY = 1 << 24
LABELS = 1000
PROCESSES = 1 << 17
FACTOR = 1e30
"""For learning rates, norms and weights; the largest float32 is 3e38."""
