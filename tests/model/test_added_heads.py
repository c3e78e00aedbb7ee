"""n-gram heads that are added to a model: they change nothing until they are trained."""

import re
from typing import Any

import pytest
import torch
from attention.cases import both_types
from grids import thinned
from model.shapes import SHAPES
from models import predict, stirred

from lmlong import recipe
from lmlong.errors import RecipeError
from lmlong.model.language_model import LanguageModel
from lmlong.recipe import file as recipe_file
from lmlong.training.distillation import layer_errors

VOCABULARY = 40


def build(name: str, **more: Any) -> LanguageModel:
    options = {"width": 16, "heads": 2, **SHAPES[name], "layers": 3, "add_ngram": [], **more}
    return LanguageModel(recipe.Model(**options), VOCABULARY).eval()


def pair(name: str, dtype: torch.dtype) -> tuple[LanguageModel, LanguageModel]:
    """Return a trained model, and the same with new heads."""
    before, after = stirred(build(name), 0.5).to(dtype), build(name, add_ngram=[1, 3]).to(dtype)
    missing = after.load_state_dict(before.state_dict(), strict=False).missing_keys
    assert missing and all(re.match(r"blocks\.[02]\.ngram\.", name) for name in missing)
    return before, after


def text(time: int = 90) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(4, (2, time), generator=draw)
    return tokens, torch.rand(2, time, generator=draw) < 1 / 30


@thinned(pytest.mark.parametrize("name", ["elu", "delta", "softmax", "like Llama", "softmax like Llama"]), both_types)
@torch.no_grad()
def test_new_heads_leave_the_outputs_as_they_were_to_the_bit(name: str, dtype: torch.dtype) -> None:
    before, after = pair(name, dtype)
    tokens, starts = text()
    (logits, state), (expected, expected_state) = (predict(model, tokens, None, starts) for model in (after, before))
    assert torch.equal(logits, expected)
    for token in tokens[:, :3].T:
        (logits, state), (expected, expected_state) = after.step(token, state), before.step(token, expected_state)
        assert torch.equal(logits, expected)


def test_heads_are_a_second_mixer_of_the_layer() -> None:
    model = stirred(build("elu", add_ngram=[2]), 0.5)
    assert model.kinds == ["linear", "linear", "ngram", "linear"]
    x, state = torch.randn(2, 5, 32), model.init_state(2)
    _, positions = model.embed(torch.zeros(2, 5, dtype=torch.long), state, None)
    block, own = model.blocks[1], state.blocks[1:3]
    y, _ = block(x, own, positions)
    mixed = x + block.mixer(x, own[0], positions)[0]
    mixed = mixed + block.ngram(mixed, own[1], positions)[0]
    assert torch.equal(y, mixed + block.mlp(mixed))


def test_the_error_of_layers_takes_the_teachers_heads_with_it() -> None:
    teacher, student = (stirred(build("softmax without positions", add_ngram=layers), 0.5) for layers in ([1], []))
    student.load_state_dict({name: x for name, x in teacher.state_dict().items() if name in student.state_dict()})
    tokens, starts = text()
    assert layer_errors(student, teacher, tokens, starts).max() < 1e-6
    inputs: list[torch.Tensor] = []
    teacher.blocks[1].mixer.register_forward_hook(lambda module, arguments, output: inputs.append(arguments[0]))
    layer_errors(student, teacher, tokens, starts)
    teacher(tokens, None, starts)
    assert torch.equal(*inputs)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.add_ngram=[7]"], "there is no layer 7. Choose from 1 to 6."),
        (["model.add_ngram=[2, 2]"], "names a layer twice"),
        (["model.add_ngram=[0]"], "model.add_ngram"),
        (["model.add_ngram=[2]", "model.downsample={factor: 2}"], "not supported with downsample"),
        (["model.add_ngram=[2]", "objective=masked"], "an encoder already sees"),
        (["training.only_ngram=true"], "the model has no added heads"),
        (["model.add_ngram=[2]", "training={only_ngram: true, quantize: int8}"], "parts of the model only"),
        (
            ["model.add_ngram=[2]", "training={only_ngram: true, teacher: runs/t, teacher_of: layers}"],
            "trains the attention of each layer",
        ),
        (["model.add_ngram=[2]", "training={only_ngram: true, strategy: deepspeed}"], "not supported with only_ngram"),
    ],
    ids=range(9),
)
def test_options_that_do_not_fit_added_heads_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        recipe_file.load({"training": {"steps": 1}}, overrides)
