"""Encoders whose layers in the middle read blocks: as they are defined, values and gradients, and with padding."""

import pytest
import torch
from grids import thinned
from model.test_encoder import FORMS, LENGTHS, LONGEST, VOCABULARY, check_padding, fresh, texts
from models import stirred
from torch import Tensor
from torch.nn.functional import linear, pad
from torch.testing import assert_close

from lmlong.attention.encoder.linformer import Linformer
from lmlong.errors import UsageError
from lmlong.model.encoder import Encoder
from lmlong.model.hourglass import EncoderHourglass, encoder_hourglass_reference
from lmlong.model.loss import IGNORED
from lmlong.model.segments import text_loss
from lmlong.recipe import Attention, Downsample
from lmlong.recipe import Linformer as LinformerOptions

CUTS = [
    Downsample(factor=3, kind="mean"),
    Downsample(factor=3, kind="max", layers=2),
    Downsample(factor=3, kind="conv", layers=1),
]
UNEVEN = [
    Downsample(factor=5, kind=kind) for kind in ("mean", "max", "conv")
]  # 12 tokens: the last block is half empty
SHARED = [form for form in FORMS if form.startswith("layerwise")]
every_form = pytest.mark.parametrize("form", [form for form in FORMS if form not in SHARED])
every_cut = pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.kind)
uneven_too = pytest.mark.parametrize("cut", CUTS + UNEVEN, ids=lambda cut: f"{cut.kind}-{cut.factor}")


def build(form: str, cut: Downsample, **shape: object) -> Encoder:
    return stirred(fresh(FORMS[form], downsample=cut, **shape), 0.5).double().eval()


def pooled(hourglass: EncoderHourglass, block: Tensor) -> Tensor:
    """A block of up to `factor` tokens, by its definition."""
    if hourglass.convolution is not None:
        return hourglass.convolution.weight @ pad(block, (0, 0, 0, hourglass.factor - len(block))).flatten()
    return block.mean(0) if hourglass.kind == "mean" else block.max(0).values


def defined(model: Encoder, tokens: Tensor) -> Tensor:
    """What the model reads of a text (time,) alone, layer by layer."""
    hourglass, middle = model.hourglass, model.downsampled_layers
    assert hourglass is not None

    def inner(blocks: Tensor) -> Tensor:
        x = blocks[None]
        for block in model.blocks[middle.start : middle.stop]:
            x = block(x, None)
        return linear(hourglass.norm(x[0]), hourglass.out_proj.weight)

    x = model.embedding(tokens)[None] * model.embedding.embedding_dim**0.5
    for block in model.blocks[: middle.start]:
        x = block(x, None)
    x = encoder_hourglass_reference(x[0], hourglass.factor, lambda block: pooled(hourglass, block), inner)[None]
    for block in model.blocks[middle.stop :]:
        x = block(x, None)
    return model.norm(x)[0]


@thinned(every_form, every_cut)
def test_values_and_gradients_of_padded_rows_are_those_of_the_definition(form: str, cut: Downsample) -> None:
    check_definition(build(form, cut))


@pytest.mark.parametrize("form", ["full", "elu", "linformer"])
@pytest.mark.parametrize("cut", UNEVEN, ids=lambda cut: cut.kind)
def test_a_length_that_the_factor_does_not_divide_follows_the_definition(form: str, cut: Downsample) -> None:
    linformer = Attention(kind="linformer", linformer=LinformerOptions(projected=3))
    check_definition(stirred(fresh(FORMS.get(form, linformer), downsample=cut), 0.5).double().eval())


def check_definition(model: Encoder) -> None:
    tokens, padding = texts()
    mine = model(tokens, None, padding)[0][~padding]
    truth = torch.cat([defined(model, row[:length]) for row, length in zip(tokens, LENGTHS, strict=True)])
    assert_close(mine, truth, rtol=1e-9, atol=1e-9)
    weights = list(model.parameters())
    slope = torch.randn(truth.shape, dtype=truth.dtype, generator=torch.Generator().manual_seed(1))
    slopes = (torch.autograd.grad(y, weights, slope, materialize_grads=True) for y in (mine, truth))
    for gradient, other in zip(*slopes, strict=True):
        assert_close(gradient, other, rtol=1e-8, atol=1e-8 * max(1, float(other.abs().max())))


@thinned(pytest.mark.parametrize("form", ["full", "efficient", "elu"]), uneven_too)
def test_padding_changes_nothing(form: str, cut: Downsample) -> None:
    check_padding(build(form, cut))


def test_a_fresh_hourglass_adds_nothing_and_learns() -> None:
    model, (tokens, padding) = fresh(FORMS["full"], downsample=Downsample(kind="conv")).eval(), texts()
    assert model.hourglass is not None and model.hourglass.convolution is not None
    assert float(model.hourglass.convolution.weight.detach().std()) == pytest.approx((4 * 8) ** -0.5, rel=0.1)
    x = torch.randn(2, 9, 8)
    pooled, _ = model.hourglass.downsample(x, None)
    assert torch.equal(model.hourglass.upsample(x, pooled), x)
    text_loss(model, tokens, torch.where(padding, IGNORED, tokens % VOCABULARY), padding)[0].backward()
    grad = model.hourglass.out_proj.weight.grad
    assert grad is not None and grad.any()


def test_matrices_are_as_long_as_what_their_layer_reads() -> None:
    def lengths(cut: Downsample, longest: int = LONGEST, **options: object) -> list[int]:
        attention = Attention(kind="linformer", linformer=LinformerOptions.model_validate(options))
        blocks = fresh(attention, longest=longest, downsample=cut).blocks
        return [block.mixer.attention.longest for block in blocks if isinstance(block.mixer.attention, Linformer)]

    cut = Downsample(factor=4)
    assert lengths(cut, projected=3) == [12, 3, 12]
    assert lengths(cut, longest=13, projected=[6, 4, 6]) == [13, 4, 13]
    for options, message in [
        ({"projected": 4}, "projected: 4 slots for a longest input of 3"),
        ({"projected": [6, 2, 6], "projection": "mean"}, "projected: 2 does not divide a longest input of 3"),
        (
            {"projected": 3, "sharing": "layerwise"},
            "sharing: layers with inputs of 12 and 3 vectors cannot share one matrix",
        ),
    ]:
        with pytest.raises(UsageError, match=message):
            lengths(cut, **options)
