"""Language models beyond the laws: what their options change, their output layer, and how texts are scored."""

import math
from typing import Any

import pytest
import torch
from machine import needs_compiler
from models import predict, stirred
from torch import nn
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

from lmlong import recipe
from lmlong.attention import laws
from lmlong.model import language_model, metrics
from lmlong.model.base import LMHead
from lmlong.model.language_model import LanguageModel
from lmlong.model.loss import IGNORED
from lmlong.model.metrics import LossTotals
from lmlong.model.rope import apply_rope, document_positions, rope_frequencies
from lmlong.model.segments import text_loss
from lmlong.recipe import Rope, RopeScaling
from lmlong.recipe.kinds import ATTENTION_KINDS

TOKENS = torch.randint(40, (2, 70), generator=torch.Generator().manual_seed(0))


def build(**options: object) -> LanguageModel:
    torch.manual_seed(0)
    shape = {"width": 32, "layers": 2, "heads": 4, "attention": recipe.Attention(kind="linear"), **options}
    return LanguageModel(recipe.Model(**shape), 40)  # type: ignore[arg-type]


def test_an_untrained_model_has_the_loss_of_a_uniform_distribution() -> None:
    nats, _ = text_loss(build(), TOKENS, TOKENS.roll(-1, 1))
    assert abs(nats.item() / 140 - math.log(40)) < 0.1


def test_blocks_add_up_in_the_dtype_of_products() -> None:
    model, inputs = build(), []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, given: inputs.append(given[0].dtype))
    exact, _ = model(TOKENS)
    with torch.autocast("cpu", torch.bfloat16):
        rounded, _ = model(TOKENS)
    assert inputs == 2 * [torch.float32] + 2 * [torch.bfloat16]
    assert rounded.dtype == torch.float32 and (rounded - exact).norm() < 0.02 * exact.norm()


def test_learned_gates_begin_by_remembering_from_2_to_8192_tokens() -> None:
    model = build(attention=recipe.Attention(kind="linear", decay="learned"))
    kept = model.blocks[0].mixer.forget_gate(torch.randn(1, 1, 32))[0, :, 0].exp()
    assert torch.allclose(1 / (1 - kept), torch.tensor([2.0, 32.0, 512.0, 8192.0]), rtol=1e-3)


def test_the_output_layer_returns_logits_or_the_loss_of_targets() -> None:
    hidden, targets = torch.randn(2, 5, 4), torch.randint(6, (2, 5))
    head = LMHead(nn.Embedding(7, 4), has_mask_token=True)
    logits = head(hidden)
    assert logits.shape == (2, 5, 6), "the mask token is never predicted"
    expected = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(2, 5)
    assert_close(head(hidden, targets=targets, reduction="none"), expected)
    assert_close(head(hidden, targets=targets), expected.sum())


def test_tied_weights_are_stored_and_trained_once() -> None:
    for tied, names in ((True, []), (False, ["lm_head.output.weight"])):
        model = LanguageModel(recipe.Model(width=8, layers=1, heads=2, tied_output=tied), 10)
        assert [name for name in model.state_dict() if name.startswith("lm_head")] == names
        assert [name for name, _ in model.named_parameters() if name.startswith("lm_head")] == names
        assert (model.lm_head.weight is model.embedding.weight) == tied
        model.load_state_dict(model.state_dict())


def test_ratios_are_taken_once_from_sums_and_are_nan_without_targets() -> None:
    totals = LossTotals(nats=6.0, tokens=4, bytes=8) + LossTotals(nats=2.0, tokens=4, bytes=2)
    assert totals.nats_per_token == 1.0
    assert totals.perplexity == math.e
    assert math.isclose(totals.bits_per_byte, 8 / math.log(2) / 10)
    assert math.isnan(LossTotals().nats_per_token) and math.isnan(LossTotals().bits_per_byte)


def test_long_rows_read_in_pieces_score_what_they_score_whole(monkeypatch) -> None:
    model, tokens = build().double(), torch.randint(20, (3, 90))
    targets = tokens.roll(-1, 1)
    targets[1, 4] = IGNORED
    starts = torch.rand(3, 90) < 0.05
    token_bytes = torch.arange(40)
    whole = metrics.loss_totals(model, [(tokens, targets, starts)], token_bytes)
    monkeypatch.setattr(language_model, "PIECE", 17)
    pieces = metrics.loss_totals(model, [(tokens, targets, starts)], token_bytes)
    nats, _ = text_loss(model, tokens, targets, starts)
    assert math.isclose(whole.nats, nats.item(), rel_tol=1e-12)
    assert math.isclose(pieces.nats, whole.nats, rel_tol=1e-12)
    assert whole.tokens == pieces.tokens == 269
    assert whole.bytes == pieces.bytes == int(targets[targets != IGNORED].sum())


@pytest.mark.parametrize("kind", ["linear", ["linear", "window", "softmax"]], ids=str)
def test_a_forward_hook_sees_every_block_and_attention(kind: Any) -> None:
    model, seen = build(layers=3, attention=recipe.Attention(kind=kind, feature_map="favor", window=16)), []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _, inputs, output, name=name: seen.append(name))
    predict(model, TOKENS)
    # a list has no forward, and a feature map has one for queries and one for keys
    without = {name for name, _ in model.named_modules() if name == "blocks" or name.endswith("feature_map")}
    assert set(seen) == {name for name, _ in model.named_modules()} - without


@pytest.mark.slow
@needs_compiler
@pytest.mark.filterwarnings("ignore")
def test_torch_compile_changes_nothing() -> None:
    """As anyone would call it, on a model of all kinds of attention: values, states and gradients."""
    kinds = recipe.Attention(kind=["linear", "window", "softmax"], window=16)
    model = stirred(build(layers=3, attention=kinds), 0.3)
    upstream = torch.randn(2, 70, 32, generator=torch.Generator().manual_seed(1))
    weights = list(model.parameters())
    plain, state = model(TOKENS)
    compiled, compiled_state = torch.compile(model)(TOKENS)
    assert laws.error(compiled, plain) < 1e-5
    for mine, truth in zip(laws.state_tensors(compiled_state), laws.state_tensors(state), strict=True):
        assert laws.error(mine, truth) < 1e-5
    grads = (torch.autograd.grad(y, weights, upstream) for y in (compiled, plain))
    for mine, truth in zip(*grads, strict=True):
        assert laws.error(mine, truth) < 1e-4


def test_products_depend_on_distance_alone() -> None:
    q, k = torch.randn(2, 1, 3, 1, 8, dtype=torch.float64)
    products = []
    for shift in (0, 5, 100_000):
        place = torch.tensor([[shift]])
        turned = (apply_rope(x, where, Rope()) for x, where in ((q, place + 7), (k, place)))
        products.append(math.prod(turned).sum(-1))
    assert torch.allclose(products[0], products[1], atol=1e-12)
    assert torch.allclose(products[0], products[2], atol=1e-9)


def test_a_rotation_is_that_of_the_formula() -> None:
    x = torch.tensor([[[[1.0, 0.0]]]], dtype=torch.float64)
    turned = apply_rope(x, torch.tensor([[2]]), Rope()).flatten()
    assert turned.tolist() == pytest.approx([math.cos(2), math.sin(2)], abs=1e-12)


def test_scaling_slows_down_the_turns_that_are_slow_within_the_original_length() -> None:
    """By the formula of Llama 3.1: 8,192 tokens, the factors 8, 1 and 4, the base 500,000."""
    scaling = RopeScaling(factor=8, original_length=8192)
    plain, scaled = (rope_frequencies(128, Rope(base=500_000, scaling=each)).tolist() for each in (None, scaling))
    wavelengths = [2 * math.pi / frequency for frequency in plain]
    for before, after, wavelength in zip(plain, scaled, wavelengths, strict=True):
        if wavelength < 8192 / 4:
            assert after == before
        elif wavelength > 8192 / 1:
            assert after == pytest.approx(before / 8)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            assert after == pytest.approx((1 - smooth) * before / 8 + smooth * before)
    assert {8.0, 1.0} < {round(before / after, 6) for before, after in zip(plain, scaled, strict=True)}


def test_positions_continue_from_the_state_and_restart_with_a_document() -> None:
    starts = torch.tensor([[False, False, True, False, True], [True, False, False, False, False]])
    assert document_positions(starts, torch.tensor([7, 7]), 5).tolist() == [[7, 8, 0, 1, 0], [0, 1, 2, 3, 4]]
    assert document_positions(None, torch.tensor([3]), 3).tolist() == [[3, 4, 5]]


@pytest.mark.parametrize("kind", [name for name, about in ATTENTION_KINDS.items() if about.causal])
def test_a_state_that_is_not_wanted_changes_neither_loss_nor_gradient(kind: str) -> None:
    window = {"window": 8} if kind == "window" else {}
    model = build(attention=recipe.Attention(kind=kind, **window))  # type: ignore[arg-type]
    stirred(model)
    starts = torch.zeros(2, 70, dtype=torch.bool)
    starts[0, 31] = True

    def loss_and_gradients(wants_state: bool) -> tuple[torch.Tensor, ...]:
        nats, after = text_loss(model, TOKENS, TOKENS.roll(-1, 1), starts, wants_state=wants_state)
        assert (after is None) != wants_state
        return nats, *torch.autograd.grad(nats, [weight for weight in model.parameters() if weight.requires_grad])

    for wanted, unwanted in zip(loss_and_gradients(True), loss_and_gradients(False), strict=True):
        assert torch.equal(wanted, unwanted)
