"""Causal attentions behind one contract, those for encoders behind another; a new one is a line here and its options
in the recipe."""

from collections.abc import Callable, Sequence

from lmlong import recipe
from lmlong.attention.contract import CausalAttention
from lmlong.attention.encoders import (
    BidirectionalLinearAttention,
    EfficientAttention,
    EncoderAttention,
    FullAttention,
)
from lmlong.attention.favor import Favor
from lmlong.attention.features import Cosine, Elu, FeatureMap, Relu, Softmax, Taylor
from lmlong.attention.linear import LinearAttention
from lmlong.attention.linformer import linformer_layers
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


ENCODER: dict[str, Callable[[Sequence[int], int, int, recipe.Attention], list[EncoderAttention]]] = {
    "full": lambda longest, heads, width, options: [FullAttention() for _ in longest],
    "linformer": lambda longest, heads, width, options: linformer_layers(longest, heads, width, options.linformer),
    "efficient": lambda longest, heads, width, options: [EfficientAttention() for _ in longest],
    "linear": lambda longest, heads, width, options: [
        BidirectionalLinearAttention(FEATURE_MAPS[options.feature_map](heads, width, options)) for _ in longest
    ],
}
"""From the longest input of each layer, heads, head width and options to the attentions of all layers, since
Linformer's may share matrices."""
