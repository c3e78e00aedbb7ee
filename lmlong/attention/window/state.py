"""The state of window attention: the last keys and values.

B batch, H heads, W window, K key dim, V value dim.
"""

from typing import NamedTuple

from torch import Tensor


class WindowState(NamedTuple):
    k: Tensor  # (B, H, W - 1, K) the last keys
    v: Tensor  # (B, H, W - 1, V) and values
    current: Tensor  # (B, W - 1) bool, true for tokens of the row's current document
