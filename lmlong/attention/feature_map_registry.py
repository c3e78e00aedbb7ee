"""Feature maps by their names in recipes. A new one needs a line here and in lmlong/recipe/kinds.py.

Plug-ins are registered in the same dict (plugins.py).
"""

from collections.abc import Callable

from lmlong import recipe
from lmlong.attention.favor import Favor
from lmlong.attention.feature_maps import Cosine, Elu, FeatureMap, Hedgehog, Relu, Softmax, Taylor

FEATURE_MAPS: dict[str, Callable[[int, int, recipe.Attention], FeatureMap]] = {
    "elu": lambda heads, head_dim, options: Elu(head_dim),
    "relu": lambda heads, head_dim, options: Relu(head_dim),
    "cosine": lambda heads, head_dim, options: Cosine(head_dim),
    "softmax": lambda heads, head_dim, options: Softmax(head_dim),
    "hedgehog": lambda heads, head_dim, options: Hedgehog(heads, head_dim),
    "taylor": lambda heads, head_dim, options: Taylor(heads, head_dim, options.taylor.width),
    "favor": lambda heads, head_dim, options: Favor(
        heads, head_dim, options.favor.features or 2 * head_dim, options.favor.form, options.favor.norms
    ),
}
"""(heads, head dim, options) -> a feature map."""
