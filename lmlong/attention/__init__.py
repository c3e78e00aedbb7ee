"""Causal attentions behind one contract; a new one is a line here and its options in recipe.py."""

from collections.abc import Callable

from lmlong import recipe
from lmlong.attention.contract import CausalAttention
from lmlong.attention.favor import Favor
from lmlong.attention.features import Cosine, Elu, FeatureMap, Relu, Softmax, Taylor
from lmlong.attention.linear import LinearAttention
from lmlong.attention.softmax import SoftmaxAttention
from lmlong.attention.window import WindowAttention

FEATURE_MAPS: dict[str, Callable[[int, int, recipe.Attention], FeatureMap]] = {
    "elu": lambda heads, width, options: Elu(width),
    "relu": lambda heads, width, options: Relu(width),
    "cosine": lambda heads, width, options: Cosine(width),
    "softmax": lambda heads, width, options: Softmax(width),
    "taylor": lambda heads, width, options: Taylor(heads, width, options.taylor.width),
    "favor": lambda heads, width, options: Favor(
        heads, width, options.favor.features or 2 * width, options.favor.form, options.favor.norms
    ),
}

CAUSAL: dict[str, Callable[[int, int, recipe.Attention], CausalAttention]] = {
    "linear": lambda heads, width, options: LinearAttention(
        heads, width, FEATURE_MAPS[options.feature_map](heads, width, options), options.decay
    ),
    "window": lambda heads, width, options: WindowAttention(heads, width, options.window),
    "softmax": lambda heads, width, options: SoftmaxAttention(heads, width),
}
