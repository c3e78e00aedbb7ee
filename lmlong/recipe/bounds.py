"""Upper limits of the numbers in a recipe, beyond what any machine holds, so that a typo is reported as a mistake.

lmlong/model/memory.py refuses sizes that are possible alone but not together.
"""

LARGEST_SHOWN = 1 << 16
"""An upper limit above this is shown only in the message for a value beyond it."""
WIDTH = 1 << 17
FEATURES = 1 << 20
TOKENS = 1 << 31
"""Of a sequence, a window or a segment."""
ROWS = 1 << 20
"""Of a batch, or of forward passes accumulated for one step."""
COUNT = 1 << 53
"""Of steps, tokens or bytes."""
VOCABULARY = 1 << 24
PROCESSES = 1 << 17
FACTOR = 1e30
"""Of a learning rate, a norm or a weight; the largest float32 is 3e38."""
