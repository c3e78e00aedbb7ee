"""Causal attentions behind one contract; a new one is a line here and its options in recipe.py."""

from collections.abc import Callable

from lmlong import recipe
from lmlong.attention.contract import CausalAttention
from lmlong.attention.features import Elu, FeatureMap, Relu
from lmlong.attention.linear import LinearAttention
from lmlong.attention.softmax import SoftmaxAttention

FEATURE_MAPS: dict[str, type[FeatureMap]] = {"elu": Elu, "relu": Relu}


def linear(heads: int, width: int, options: recipe.Attention) -> CausalAttention:
    return LinearAttention(heads, width, FEATURE_MAPS[options.feature_map](width), options.decay)


def softmax(heads: int, width: int, options: recipe.Attention) -> CausalAttention:
    return SoftmaxAttention(heads, width)


CAUSAL: dict[str, Callable[[int, int, recipe.Attention], CausalAttention]] = {"linear": linear, "softmax": softmax}

TURNED_BY_POSITION = {"softmax"}
"""Attentions whose queries and keys are turned by their place unless the recipe says otherwise: they know no order."""
