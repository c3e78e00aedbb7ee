"""Encoders as wholes, with every attention they can have: padding, places, loss, weights that layers share, and
layers in the middle that read blocks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from attention.cases import ENCODER_FORMS
from grids import thinned
from models import stirred
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, pad
from torch.testing import assert_close

from lmlong import recipe
from lmlong.attention.encoder.linformer import Linformer
from lmlong.attention.registry import ENCODER
from lmlong.checkpoint import read, write
from lmlong.errors import UsageError
from lmlong.model.base import EMBEDDING_STD, count_parameters
from lmlong.model.encoder import Encoder
from lmlong.model.hourglass import BlockPooling, encoder_hourglass_reference
from lmlong.model.loss import IGNORED
from lmlong.model.metrics import text_nll
from lmlong.model.segments import text_loss
from lmlong.recipe import Attention, Downsample, Favor

VOCABULARY, LONGEST = 20, 12
LENGTHS = [12, 7, 1, 5]

FORMS = {
    **{name: ENCODER_FORMS[name] for name in ("full", "efficient", "elu", "layerwise-linear", "headwise-conv")},
    "favor-hyperbolic": Attention(kind="linear", feature_map="favor", favor=Favor(form="hyperbolic", norms="quantile")),
    "pattern": Attention(kind=["linformer", "full", "linear"], linformer=recipe.Linformer(projected=4)),
}
"""One of each kind: tests/attention/test_encoder.py has every form."""

every_form = pytest.mark.parametrize("form", FORMS)


def fresh(attention: Attention, layers: int = 3, heads: int = 2, longest: int = LONGEST, **shape: object) -> Encoder:
    options = recipe.Model(width=4 * heads, layers=layers, heads=heads, attention=attention, **shape)  # type: ignore[arg-type]
    torch.manual_seed(0)
    return Encoder(options, VOCABULARY, longest)


def build(form: str, **shape: object) -> Encoder:
    return stirred(fresh(FORMS[form], **shape)).double().eval()


def texts(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens, the mask among them, and where a row has none."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (len(LENGTHS), LONGEST), generator=draw)
    tokens[:, 1::4] = VOCABULARY
    return tokens, torch.arange(LONGEST) >= torch.tensor(LENGTHS)[:, None]


def test_every_kind_is_among_the_forms() -> None:
    assert {kind for form in FORMS.values() for kind in recipe.Model(attention=form).kinds} == set(ENCODER)


@every_form
def test_padding_changes_nothing(form: str) -> None:
    check_padding(build(form))


@torch.no_grad()
def check_padding(model: Encoder) -> None:
    """Neither its tokens, nor its length, nor a row of it alone changes what the rows give."""
    tokens, padding = texts()
    hidden, _ = model(tokens, None, padding)
    other = torch.where(padding, (tokens + 3) % VOCABULARY, tokens)
    assert torch.equal(model(other, None, padding)[0][~padding], hidden[~padding])
    empty = padding.clone()
    empty[1] = True
    beside_empty, _ = model(tokens, None, empty)
    assert beside_empty.isfinite().all() and torch.equal(beside_empty[[0, 2, 3]], hidden[[0, 2, 3]])
    for row, length in enumerate(LENGTHS):
        for time in {length, min(length + 1, LONGEST), LONGEST}:
            alone, _ = model(tokens[row : row + 1, :time], None, padding[row : row + 1, :time])
            assert_close(alone[0, :length], hidden[row, :length], rtol=1e-9, atol=1e-9)
        assert_close(model(tokens[row : row + 1, :length])[0][0], hidden[row, :length], rtol=1e-9, atol=1e-9)


@every_form
def test_the_loss_is_that_of_the_targets_by_its_definition(form: str) -> None:
    """Values and gradients, of the embedding too, which the output shares but for the mask."""
    model, (tokens, padding) = build(form), texts()
    targets = torch.where((tokens % 3 == 0) & ~padding, (tokens + 1) % VOCABULARY, IGNORED)
    nats, state = text_loss(model, tokens, targets, padding)
    assert state is None
    logits = model(tokens, None, padding)[0] @ model.embedding.weight[:VOCABULARY].mT
    truth = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    assert torch.allclose(nats, truth, rtol=1e-12)
    of_each, _ = text_nll(model, tokens, targets, padding)
    assert torch.allclose(of_each.sum(), truth, rtol=1e-12) and not of_each[targets == IGNORED].any()
    weights = list(model.parameters())
    mine, theirs = (torch.autograd.grad(loss, weights, materialize_grads=True) for loss in (nats, truth))
    for slope, true_slope in zip(mine, theirs, strict=True):
        assert (slope - true_slope).norm() <= 1e-10 * true_slope.norm()
    assert mine[0][VOCABULARY].any(), "the mask learns as it is read"


@every_form
@torch.no_grad()
def test_the_order_of_tokens_changes_what_is_read(form: str) -> None:
    """Tokens in another order are told otherwise, whatever the attention."""
    order = torch.tensor([0, 3, 2, 1, *range(4, LONGEST)])
    tokens, _ = texts()
    for positions in ("rotary", "absolute"):
        model = build(form, positions=positions)
        moved, kept = model(tokens[:1, order])[0], model(tokens[:1])[0][:, order]
        assert (moved - kept).abs().amax(-1).min() > 1e-4
    if form in ("full", "elu", "efficient"):
        bag = build(form, positions="none", convolution=0)
        moved, kept = bag(tokens[:1, order])[0], bag(tokens[:1])[0][:, order]
        assert (moved - kept).abs().max() < 1e-8


@pytest.mark.parametrize("taps", [1, 4, 5])
@torch.no_grad()
def test_the_convolution_adds_the_neighbours_on_both_sides(taps: int) -> None:
    mixer = build("full", convolution=taps).blocks[0].mixer
    x = torch.randn(2, LONGEST, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole, weight = mixer(x, None), mixer.convolution
    assert weight is not None
    mixer.convolution = None
    y, normed = mixer(x, None), pad(mixer.norm(x), (0, 0, taps // 2, taps))
    for tap in range(taps):
        y += normed[:, tap : tap + LONGEST] * weight[:, 0, tap]
    assert_close(whole, y, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_positions_are_as_large_as_fresh_embeddings() -> None:
    model, read = fresh(FORMS["full"], positions="absolute"), []
    torch.nn.init.zeros_(model.embedding.weight)
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    model(texts()[0])
    assert float(read[0].square().mean().sqrt()) == pytest.approx(EMBEDDING_STD * model.embedding_scale)


@pytest.mark.parametrize(("sharing", "number"), [("none", 288), ("headwise", 24), ("key-value", 12), ("layerwise", 1)])
def test_matrices_of_twelve_layers_of_twelve_heads(sharing: str, number: int, tmp_path: Path) -> None:
    """In the model, among its parameters and in the file of its weights, from which they come back to all who share."""
    options = Attention(kind="linformer", linformer=recipe.Linformer(projected=2, sharing=sharing))  # type: ignore[arg-type]
    model = stirred(fresh(options, layers=12, heads=12, longest=8))
    without = count_parameters(fresh(Attention(kind="full"), layers=12, heads=12))
    assert count_parameters(model) == without + number * 2 * 8

    weights = model.state_dict()
    assert sum(name.endswith(".matrix") for name in weights) == number
    write.write(tmp_path / "step-00000001", write.Contents(weights, {}, "", b"", 1))
    other = stirred(fresh(options, layers=12, heads=12, longest=8), seed=1)
    read.load_weights(other, tmp_path / "step-00000001")
    for mine, loaded in zip(model.blocks, other.blocks, strict=True):
        attention, again = mine.mixer.attention, loaded.mixer.attention
        assert isinstance(attention, Linformer) and isinstance(again, Linformer)
        pairs = zip(attention.projections.parameters(), again.projections.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert count_parameters(other) == count_parameters(model), "what is shared is shared still"


@pytest.mark.parametrize("cut", [None, recipe.Downsample(factor=5, kind="conv")], ids=["", "downsampled"])
def test_activations_may_be_computed_again(cut: recipe.Downsample | None) -> None:
    tokens, padding = texts()
    targets = torch.where(padding, IGNORED, tokens % VOCABULARY)
    model = build("pattern", downsample=cut)
    plain = torch.autograd.grad(text_loss(model, tokens, targets, padding)[0], list(model.parameters()))
    model.activation_checkpointing = True
    again = torch.autograd.grad(text_loss(model, tokens, targets, padding)[0], list(model.parameters()))
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(plain, again, strict=True))


LINFORMER = recipe.Linformer(projected=3)
HOURGLASS_FORMS = {
    **{name: FORMS[name] for name in ("full", "efficient", "elu", "favor-hyperbolic")},
    "linformer": Attention(kind="linformer", linformer=LINFORMER),
    "pattern": Attention(kind=["linformer", "full", "linear"], linformer=LINFORMER),
}


def pooled(hourglass: BlockPooling, block: Tensor) -> Tensor:
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


@thinned(
    pytest.mark.parametrize("form", HOURGLASS_FORMS),
    pytest.mark.parametrize(("kind", "layers"), [("mean", None), ("max", 2), ("conv", 1)]),
)
def test_padded_rows_are_read_as_each_alone_by_the_definition(form: str, kind: Any, layers: int | None) -> None:
    """Values and gradients. Of 12 tokens, the last block of 5 is half empty."""
    for cut in (Downsample(factor=3, kind=kind, layers=layers), Downsample(factor=5, kind=kind)):
        model = stirred(fresh(HOURGLASS_FORMS[form], downsample=cut), 0.5).double().eval()
        check_definition(model)
        check_padding(model)


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
        attention = Attention(kind="linformer", linformer=recipe.Linformer.model_validate(options))
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
