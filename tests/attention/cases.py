"""Every causal attention, in every form a recipe can give it, and random inputs for it."""

from typing import get_args

import pytest
import torch
from torch import Tensor

from lmlong import recipe
from lmlong.attention import CAUSAL, FEATURE_MAPS
from lmlong.attention.contract import CausalAttention
from lmlong.attention.laws import Inputs

HEADS, WIDTH = 3, 8
DECAYS = get_args(recipe.Attention.model_fields["decay"].annotation)


def _forms() -> list[recipe.Attention]:
    """One of each kind, and all forms of the linear one."""
    linear = [
        recipe.Attention(kind="linear", feature_map=name, decay=decay) for name in FEATURE_MAPS for decay in DECAYS
    ]
    return linear + [recipe.Attention(kind=kind) for kind in CAUSAL if kind != "linear"]


def name(options: recipe.Attention) -> str:
    return f"{options.kind}-{options.feature_map}-{options.decay}" if options.kind == "linear" else str(options.kind)


FORMS = _forms()
every_form = pytest.mark.parametrize("form", FORMS, ids=name)
both_types = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


def build(form: recipe.Attention) -> CausalAttention:
    assert isinstance(form.kind, str)
    return CAUSAL[form.kind](HEADS, WIDTH, form)


def inputs(
    attention: CausalAttention, time: int, dtype: torch.dtype, batch: int = 2, seed: int = 0, starts: bool = True
) -> Inputs:
    """(q, k, v, starts, log_decay) of a random text in which about every 30th token starts a document."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)

    q, k, v = (normal(batch, HEADS, time, WIDTH) for _ in range(3))
    # gates from about 0.001 to 0.9999, as a trained model has them
    gates = torch.nn.functional.logsigmoid(3 * normal(batch, HEADS, time) + 3) if attention.gated else None
    begun = torch.rand(batch, time, generator=draw) < 1 / 30 if starts else None
    return q, k, v, begun, gates
