"""A model that learns from a teacher: what it learns, and what cannot teach it."""

import shutil
from pathlib import Path

import pytest
import torch

from lmlong.errors import UsageError
from lmlong.model.language_model import LanguageModel
from lmlong.recipe import Attention, Model
from lmlong.training.distillation import ERROR_EPSILON, layer_errors
from lmlong.training.run import train

from .conftest import FROM_RUN, LAYERS_OF_A_TEACHER, Recipes, Trains, losses, metrics, of_run, weights


@pytest.fixture(scope="module")
def teacher(train_shared: Trains) -> Path:
    """A softmax model of another width, which has learned half of what the text could teach it."""
    return train_shared("teacher", "model.attention.kind=softmax", "model.width=48")


@pytest.fixture
def taught(recipe_of: Recipes, teacher: Path) -> Recipes:
    """The tiny recipe with that teacher."""
    return lambda *overrides: recipe_of(f"training.teacher={teacher}", "training.teacher_share=0.9", *overrides)


def test_reported_loss_is_that_of_the_text(taught: Recipes, trained: Path, tmp_path: Path) -> None:
    train(taught("training.steps=1"), tmp_path / "run")
    assert losses(tmp_path / "run")[0] == losses(trained)[0], "before the first step they are one model"
    assert weights(tmp_path / "run").keys() == weights(trained).keys()


def test_resuming_with_another_teacher_is_refused(recipe_of: Recipes, teacher: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(teacher, tmp_path / "teacher", symlinks=True))
    train(recipe_of(f"training.teacher={own}", "training.steps=4"), tmp_path / "run")
    train(recipe_of("training.steps=2"), own, overwrite=True)
    with pytest.raises(UsageError, match="--resume: the teacher has changed"):
        train(recipe_of(f"training.teacher={own}", "training.steps=8"), tmp_path / "run", resume="auto")


def test_student_takes_the_tokenizer_of_its_teacher(recipe_of: Recipes, four_steps: Path, tmp_path: Path) -> None:
    pieces = "text.tokenizer={kind: sentencepiece, vocabulary: 300}"
    train(recipe_of(pieces, "training.steps=2"), tmp_path / "teacher")
    train(recipe_of("training.steps=2", f"training.teacher={tmp_path / 'teacher'}"), tmp_path / "student")
    files = [(tmp_path / name / "tokenizer.model").read_bytes() for name in ("teacher", "student")]
    assert files[0] == files[1]
    with pytest.raises(UsageError, match=r"training\.teacher: .*teacher has another tokenizer"):
        start = f"training.init_from={four_steps}"
        train(recipe_of("training.steps=2", f"training.teacher={tmp_path / 'teacher'}", start), tmp_path / "both")


def test_encoder_is_no_teacher(recipe_of: Recipes, tmp_path: Path) -> None:
    train(recipe_of("objective=masked", "training.steps=1"), tmp_path / "encoder")
    with pytest.raises(UsageError, match="is an encoder"):
        train(recipe_of(f"training.teacher={tmp_path / 'encoder'}"), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_student_reads_on_from_another_text(taught: Recipes, tmp_path: Path) -> None:
    for name, share in {"empty": 0.0, "passed": 1.0}.items():
        train(taught("training.steps=2", f"training.state_passing={share}"), tmp_path / name)
    (first, second), (same, other) = (losses(tmp_path / name) for name in ("empty", "passed"))
    assert first == same and second != other


def test_own_teacher_gives_no_gradient(recipe_of: Recipes, trained: Path, tmp_path: Path) -> None:
    itself = (f"training.teacher={trained}", f"training.init_from={trained}", "training.steps=1")
    for share in (0.5, 1.0):
        train(recipe_of(*itself, f"training.teacher_share={share}"), tmp_path / str(share))
    norms = [metrics(tmp_path / str(share))[0]["gradient_norm"] for share in (0.5, 1.0)]
    assert norms[1] < 1e-4 * norms[0]


LAYERS = (*LAYERS_OF_A_TEACHER, "training.learning_rate=3e-3", "model.convolution=4")


@pytest.fixture
def aligned(recipe_of: Recipes, softmax: Path) -> Recipes:
    """The tiny recipe with linear layers that learn to be those of a softmax model, from whose weights they begin."""
    return lambda *more: recipe_of(*of_run(LAYERS, softmax), *more)


def test_only_mixers_learn_to_be_those_of_the_teacher(aligned: Recipes, softmax: Path, tmp_path: Path) -> None:
    train(aligned("training.steps=1", "training.learning_rate=1e-30"), tmp_path / "still")
    train(aligned("training.steps=40", "training.validate_every=20"), tmp_path / "run")
    errors, lines = losses(tmp_path / "run"), metrics(tmp_path / "run")
    assert errors[-1] < 0.5 * errors[0] and "bits_per_byte" not in lines[0]  # the error of layers is none
    bits = [line["validation"]["bits_per_byte"] for line in lines if "validation" in line]
    assert bits[-1] < bits[0]
    before, still, after = (weights(run) for run in (softmax, tmp_path / "still", tmp_path / "run"))
    moved = {name for name, weight in after.items() if not torch.equal(weight, before.get(name, still[name]))}
    assert moved == {name for name in after if ".mixer." in name}
    convolutions = [weight for name, weight in still.items() if "convolution" in name]
    assert len(convolutions) == 2
    for weight in convolutions:
        assert torch.allclose(weight, torch.eye(weight.shape[1])[-1].expand_as(weight), atol=1e-6)


@pytest.mark.parametrize(("option", "ours"), [("layers=3", "3 of width 32"), ("width=48", "2 of width 48")])
def test_incomparable_layers_are_refused(
    recipe_of: Recipes, softmax: Path, tmp_path: Path, option: str, ours: str
) -> None:
    with pytest.raises(UsageError, match=f"the teacher has 2 layers of width 32, the model {ours}"):
        train(recipe_of(*of_run(set(LAYERS) - {FROM_RUN}, softmax), f"model.{option}"), tmp_path / "run")


SOFTMAX_LAYERS = Model(width=16, layers=3, heads=2, attention=Attention(kind="softmax"))
LINEAR_LAYERS = SOFTMAX_LAYERS.model_copy(update={"attention": Attention(kind="linear")})


def test_layer_reads_what_that_of_the_teacher_reads() -> None:
    torch.manual_seed(0)
    models = [LanguageModel(options, 30).double() for options in (LINEAR_LAYERS, SOFTMAX_LAYERS)]
    for model in models:
        for block in model.blocks:  # else what is added begins at 0
            torch.nn.init.normal_(block.mixer.out_proj.weight)
            torch.nn.init.normal_(block.mlp.out_proj.weight)
    student, teacher = models
    tokens = torch.randint(30, (2, 20))
    starts = torch.zeros(2, 20, dtype=torch.bool)
    starts[:, [0, 7]] = True
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def remember(_: torch.nn.Module, given: tuple, found: tuple) -> None:
        seen.append((given[0], found[0]))

    hooks = [block.mixer.register_forward_hook(remember) for block in teacher.blocks]
    teacher(tokens, None, starts)
    for hook in hooks:
        hook.remove()
    _, positions = student.embed(tokens, student.init_state(2), starts)
    truth = []
    for block, state, (x, wanted) in zip(student.blocks, student.init_state(2).blocks, seen, strict=True):
        found, _ = block.mixer(x, state, positions)
        truth.append(((found - wanted).square().mean(-1) / (wanted.square().mean(-1) + ERROR_EPSILON)).mean())
    errors = layer_errors(student, teacher, tokens, starts)
    assert torch.allclose(errors, torch.stack(truth), rtol=1e-10)
    (gradient,) = torch.autograd.grad(errors[0], student.blocks[1].mixer.out_proj.weight)
    assert not gradient.any()
    assert torch.equal(layer_errors(teacher, teacher, tokens, starts), torch.zeros(3, dtype=torch.float64))
