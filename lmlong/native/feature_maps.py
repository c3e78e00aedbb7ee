"""The numbers of feature maps in native code."""

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
