"""The laws of the contract once more, on the logits of whole language models."""

import shlex

import pytest
import torch
from attention.cases import FORMS, both_types, every_form, name
from grids import every_nth, thinned
from models import LIKE_LLAMA, predict, stirred

from lmlong import recipe
from lmlong.attention import laws
from lmlong.attention.base import state_tensors
from lmlong.attention.laws import Subject, Text
from lmlong.model.language_model import LanguageModel
from lmlong.model.segments import text_loss
from lmlong.recipe import file as recipe_file
from lmlong.recipe.find import shipped_recipes

VOCABULARY, TIME = 50, 131
EXACT = {torch.float64: 1e-10, torch.float32: 1e-4}
TABLES = recipe.NgramEmbedding(rows=30, width=8)
SHAPES: list[dict] = [
    {},
    LIKE_LLAMA,
    {"positions": "rotary"},
    {"convolution": 2, "positions": "none"},
    {"ngram_embedding": TABLES},
    {"add_ngram": [2]},
]

every_shape = pytest.mark.parametrize(
    "shape", SHAPES, ids=["default", "like Llama", "rotary", "unplaced", "tables", "added heads"]
)


def build(form: recipe.Attention, dtype: torch.dtype, **shape: object) -> LanguageModel:
    shape = {"width": 16, "layers": 2, "heads": 4 if "kv_heads" in shape else 2} | shape
    if form.kind == "delta":
        shape["head_norm"] = True
    options = recipe.Model(attention=form, **shape)  # type: ignore[arg-type]
    return stirred(LanguageModel(options, VOCABULARY)).to(dtype).eval()


def subject(model: LanguageModel) -> Subject:
    def step(x: Text, state: object) -> tuple[torch.Tensor, object]:
        tokens, starts = x
        if starts is not None and starts.any():  # a start within a batch is read, not stepped
            return predict(model, tokens, state, starts)
        logits, state = model.step(tokens[:, 0], state)
        return logits[:, None], state

    return Subject(model.init_state, lambda x, state: predict(model, x[0], state, x[1]), step, model.settle)


def text(batch: int = 2, time: int = TIME, seed: int = 0) -> Text:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (batch, time), generator=draw)
    return tokens, torch.rand(batch, time, generator=draw) < 1 / 25


@torch.no_grad()
def check_laws(model: LanguageModel, x: Text) -> None:
    """Check that a model reads a text alike in all ways."""
    reader, other, allowed = subject(model), text(len(x[0]), seed=1), EXACT[model.embedding.weight.dtype]
    assert laws.steps_equal_forward(reader, x) < allowed
    assert laws.cuts_change_nothing(reader, x, [1, 2, 40, 64, 129]) < allowed
    for time in (1, 5, 64, 130):
        assert laws.future_leaves_past(reader, x, other, time) == 0.0
    assert laws.state_is_not_modified(reader, x) == 0.0
    assert len(x[0]) == 1 or laws.rows_are_independent(reader, x, other) == 0.0


@torch.no_grad()
def check_state_size(model: LanguageModel) -> None:
    """Check that a state neither grows nor keeps the memory of a larger tensor."""
    assert len({laws.numbers_in_state(subject(model), text(time=time)) for time in (1, 50, 131)}) == 1
    tokens, starts = text()
    for tensor in state_tensors(model(tokens, None, starts)[1]):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


@thinned(every_nth(3, every_form), both_types, every_shape)
def test_all_laws(form: recipe.Attention, dtype: torch.dtype, shape: dict) -> None:
    check_laws(build(form, dtype, **shape), text())


def overrides_of(name: str) -> list[str]:
    """What a shipped recipe needs to be whole, from the command in its first line."""
    first = shipped_recipes()[name].read_text().splitlines()[0]
    return [word for word in shlex.split(first)[4:] if "=" in word]


CAUSAL_RECIPES = [
    name for name in shipped_recipes() if recipe_file.load(name, overrides_of(name)).objective == "causal"
]


@every_nth(3, pytest.mark.parametrize("recipe_name", CAUSAL_RECIPES))
def test_every_recipe_keeps_the_laws(recipe_name: str) -> None:
    """Its own pattern of layers, convolution and positions, at a small width."""
    chosen = recipe_file.load(recipe_name, overrides_of(recipe_name)).model
    small = chosen.model_copy(update={"width": 16, "heads": 2})
    check_laws(stirred(LanguageModel(small, VOCABULARY), 0.3).double().eval(), text())


@every_nth(3, pytest.mark.parametrize("form", [form for form in FORMS if form.kind == "linear"], ids=name))
def test_the_state_of_a_linear_model_never_grows(form: recipe.Attention) -> None:
    check_state_size(build(form, torch.float32))


def test_gradients_of_packed_documents_are_those_of_each_alone() -> None:
    model = build(recipe.Attention(kind="linear"), torch.float64)
    tokens, _ = text(batch=1)
    targets = tokens.roll(-1, 1)
    starts = torch.zeros_like(tokens, dtype=torch.bool)
    starts[:, [0, 2, 64, 100]] = True
    packed, _ = text_loss(model, tokens, targets, starts)
    together = torch.autograd.grad(packed, list(model.parameters()))
    alone = [torch.zeros_like(weight) for weight in model.parameters()]
    for begin, stop in ((0, 2), (2, 64), (64, 100), (100, TIME)):
        loss, _ = text_loss(model, tokens[:, begin:stop], targets[:, begin:stop])
        for total, part in zip(alone, torch.autograd.grad(loss, list(model.parameters())), strict=True):
            total += part
    for mine, truth in zip(together, alone, strict=True):
        assert laws.error(mine, truth) < 1e-10
