"""Every attention, in every form that a recipe can give it."""

from collections.abc import Iterator
from itertools import product
from typing import Any, get_args

import pytest
import torch
from torch import nn

from lmlong import recipe
from lmlong.attention.base import CausalAttention
from lmlong.attention.encoder.linformer import PROJECTIONS
from lmlong.attention.feature_map_registry import FEATURE_MAPS
from lmlong.attention.ngram.layer import NgramAttention
from lmlong.attention.registry import CAUSAL
from lmlong.recipe.kinds import FEATURE_MAP_KINDS

HEADS, HEAD_DIM, VALUE_DIM = 3, 8, 5
DECAYS = get_args(recipe.Attention.model_fields["decay"].annotation)
SHARINGS = get_args(recipe.Linformer.model_fields["sharing"].annotation)


def _forms() -> list[recipe.Attention]:
    """One of each kind, with windows both shorter and longer than a chunk, and all forms of the linear one."""
    forms = [
        recipe.Attention(kind="linear", feature_map=name, decay=decay, taylor=recipe.Taylor(width=4))
        for name in FEATURE_MAPS
        for decay in DECAYS
        if decay != "channel" or not FEATURE_MAP_KINDS[name].signed
    ]
    forms.append(recipe.Attention(kind="linear", feature_map="taylor", decay="none", taylor=recipe.Taylor(width=None)))
    forms += [
        recipe.Attention(kind="linear", feature_map="favor", decay="none", favor=recipe.Favor(form=form, norms=norms))
        for form in ("positive", "hyperbolic")
        for norms in ("chi", "fixed", "quantile")
        if (form, norms) != ("positive", "chi")
    ]
    forms += [recipe.Attention(kind="delta", decay=decay) for decay in DECAYS if decay != "channel"]
    forms += [
        recipe.Attention(kind="delta", delta=recipe.Delta(feature_map="elu")),
        recipe.Attention(kind="linear", parallel_window=5, decay="channel"),
        recipe.Attention(kind="delta", parallel_window=30),
        recipe.Attention(kind="delta", parallel_window=5, window_sink=True),
    ]
    forms += [recipe.Attention(kind="window", window=window) for window in (1, 16, 70)]
    forms += [recipe.Attention(kind="window", window=window, window_sink=True) for window in (1, 16)]
    # of three tokens: rows that n-grams share, and rows enough for all
    forms += [
        recipe.Attention(kind="ngram", ngram=recipe.Ngram(sizes=sizes, buckets=buckets))
        for sizes, buckets in (([1, 2, 3], 5), ([1, 2, 4], 64))
    ]
    return forms + [recipe.Attention(kind=kind) for kind in CAUSAL if kind not in {form.kind for form in forms}]


def name(options: recipe.Attention) -> str:
    """Return the options that were set."""

    def words(values: dict[str, Any]) -> Iterator[str]:
        for key, value in values.items():
            if isinstance(value, dict):
                yield from words(value)
            else:
                yield key if value is True else str(value)

    return "-".join(words(options.model_dump(exclude_unset=True)))


FORMS = _forms()
ENCODER_FORMS: dict[str, recipe.Attention] = {
    **{kind: recipe.Attention(kind=kind) for kind in ("full", "efficient")},  # type: ignore[arg-type]
    **{
        name: recipe.Attention(kind="linear", feature_map=name, taylor=recipe.Taylor(width=2))  # type: ignore[arg-type]
        for name in FEATURE_MAPS
    },
    **{
        f"{sharing}-{projection}": recipe.Attention(
            kind="linformer", linformer=recipe.Linformer(projected=4, sharing=sharing, projection=projection)
        )
        for sharing, projection in product(SHARINGS, PROJECTIONS)
    },
}
every_form = pytest.mark.parametrize("form", FORMS, ids=name)
each_type = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["float64", "float32", "bfloat16"]
)
both_types = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


def build(form: recipe.Attention) -> CausalAttention:
    assert isinstance(form.kind, str)
    torch.manual_seed(0)  # of random features
    attention = CAUSAL[form.kind](HEADS, HEAD_DIM, VALUE_DIM, form)
    if isinstance(attention, NgramAttention) or form.window_sink:
        for weight in attention.parameters():
            nn.init.normal_(weight)  # they begin at 0
    return attention
