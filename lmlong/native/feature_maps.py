"""The feature maps of native code: the names that recipes use, in capitals."""

from enum import IntEnum


class FeatureMap(IntEnum):
    IDENTITY = 0
    ELU = 1
    RELU = 2
    COSINE = 3
    SOFTMAX = 4
    TAYLOR = 5
    FAVOR = 6
    SILU = 7
    HEDGEHOG = 8
