"""Every attention for encoders, in every form its options can give it, against its definition and its symmetries."""

from typing import Any

import pytest
import torch
from attention.cases import ENCODER_FORMS
from grids import thinned
from torch import Tensor, nn

from lmlong import recipe
from lmlong.attention.encoder.base import EncoderAttention
from lmlong.attention.encoder.linformer import PROJECTIONS
from lmlong.attention.feature_map_registry import FEATURE_MAPS
from lmlong.attention.registry import CAUSAL, ENCODER
from lmlong.errors import UsageError
from lmlong.recipe.kinds import ATTENTION_KINDS, FEATURE_MAP_KINDS

LAYERS, HEADS, WIDTH, LONGEST = 2, 3, 4, 12
LENGTHS = [12, 7, 3, 1, 0]
"""Tokens in the rows of a padded batch, which end within a slot and at its end; the last row is only padding."""

FORMS = ENCODER_FORMS | {
    f"sizes-{projection}": recipe.Attention(
        kind="linformer",
        linformer=recipe.Linformer(projected=[[3, 6, 2], [4, 4, 12]], sharing="none", projection=projection),  # type: ignore[arg-type]
    )
    for projection in PROJECTIONS
}
every_form = pytest.mark.parametrize("form", FORMS)


def layers(options: recipe.Attention) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(ENCODER[str(options.kind)]([LONGEST] * LAYERS, HEADS, WIDTH, options)).double()


def build(form: str) -> EncoderAttention:
    """Return the attention of the last layer."""
    attention = layers(FORMS[form])[-1]
    assert isinstance(attention, EncoderAttention)
    return attention


def linformer(**options: Any) -> nn.ModuleList:
    return layers(recipe.Attention(kind="linformer", linformer=recipe.Linformer(**options)))


def inputs(time: int = LONGEST) -> list[Tensor]:
    draw, shape = torch.Generator().manual_seed(0), (len(LENGTHS), HEADS, time, WIDTH)
    return [torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(3)]


PADDING = torch.arange(LONGEST) >= torch.tensor(LENGTHS)[:, None]


def assert_definition(attention: EncoderAttention, x: list[Tensor], padding: Tensor | None = None) -> None:
    """Outputs and all gradients are those of the definition."""
    y, truth = attention(*x, padding), attention.reference(*x, padding)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=y.dtype)
    leaves = [*x, *attention.parameters()]
    mine, exact = (torch.autograd.grad(each, leaves, upstream, materialize_grads=True) for each in (y, truth))
    for a, b in zip((y, *mine), (truth, *exact), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@thinned(every_form, pytest.mark.parametrize("time", [1, 4, 7, LONGEST]))
def test_forward_is_the_definition(form: str, time: int) -> None:
    assert_definition(build(form), inputs(time))


@every_form
def test_padding_is_ignored(form: str) -> None:
    """Outputs and gradients are those of each row alone, and 0 in the padding, however large its contents are."""
    attention = build(form)
    x = [torch.where(PADDING[:, None, :, None], 50 * part, part).detach().requires_grad_() for part in inputs()]
    assert_definition(attention, x, PADDING)
    assert not attention(*x, PADDING).masked_select(PADDING[:, None, :, None]).any()


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_a_slot_for_each_token_is_full_attention(projection: str) -> None:
    attention, x = linformer(projected=LONGEST, projection=projection)[0], inputs()
    for weight in attention.parameters():
        nn.init.eye_(weight[0] if projection == "conv" else weight)
    torch.testing.assert_close(attention(*x), build("full")(*x))


def test_what_is_shared_learns_from_all_who_share_it() -> None:
    x = inputs()
    for sharing, keys_learn_from_values in [("headwise", False), ("key-value", True)]:
        attention = linformer(projected=3, sharing=sharing)[0]
        first = next(attention.parameters())
        (slope,) = torch.autograd.grad(attention(torch.zeros_like(x[0]), *x[1:]).sum(), first, materialize_grads=True)
        # queries of 0 weigh all slots alike, whatever the keys are
        assert bool(slope.any()) == keys_learn_from_values


def test_sizes_by_layer_and_by_head() -> None:
    def shapes(attention: nn.Module) -> list[int]:
        return [len(matrix) for matrix in attention.parameters()]

    assert [shapes(layer) for layer in linformer(projected=[2, 4])] == [[2, 2], [4, 4]]
    by_head = linformer(projected=[[1, 2, 3], [4, 5, 6]], sharing="none")
    assert [shapes(layer) for layer in by_head] == [[1, 2, 3] * 2, [4, 5, 6] * 2]


def test_inputs_longer_than_the_projections_are_refused() -> None:
    attention = linformer(projected=3)[0]
    with pytest.raises(UsageError, match="13 tokens: Linformer's projections E and F were built for inputs of up to"):
        attention(*inputs(LONGEST + 1))


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="5 does not divide a longest input of 12"):
        linformer(projected=5, projection="mean")
    assert len(linformer(projected=5)) == LAYERS  # a matrix needs no divisor


@thinned(every_form, pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str))
def test_other_number_formats_keep_their_type_and_come_near(form: str, dtype: torch.dtype) -> None:
    attention, x = build(form), inputs()
    truth = attention(*x, PADDING)
    y = attention.to(dtype)(*(part.to(dtype) for part in x), PADDING)
    assert y.dtype == dtype
    assert (y - truth).norm() / truth.norm() < {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]


def test_recipes_know_the_kinds_and_feature_maps() -> None:
    assert {kind for kind, about in ATTENTION_KINDS.items() if about.causal} == set(CAUSAL)
    assert {kind for kind, about in ATTENTION_KINDS.items() if about.encoder} == set(ENCODER)
    assert set(FEATURE_MAP_KINDS) == set(FEATURE_MAPS)
