"""Encoders as wholes, with every attention they can have: padding, places, loss, and weights that layers share."""

from pathlib import Path

import pytest
import torch
from attention.cases import ENCODER_FORMS
from models import stirred
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from lmlong import recipe
from lmlong.attention.encoder.linformer import Linformer
from lmlong.attention.registry import ENCODER
from lmlong.checkpoint import read, write
from lmlong.model.base import count_parameters
from lmlong.model.encoder import Encoder
from lmlong.model.loss import IGNORED
from lmlong.model.metrics import text_nll
from lmlong.model.segments import text_loss
from lmlong.recipe import Attention, Favor

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
        bag = build(form, positions="none")
        moved, kept = bag(tokens[:1, order])[0], bag(tokens[:1])[0][:, order]
        assert (moved - kept).abs().max() < 1e-8


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
