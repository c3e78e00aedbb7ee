"""A model that learns from a teacher: what it learns, and that it stays the same run."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lmlong.checkpoint import read
from lmlong.errors import RecipeError, UsageError
from lmlong.inference.loading import load
from lmlong.model.loss import Softening
from lmlong.recipe import Recipe
from lmlong.training.distillation import Teacher, taught_loss
from lmlong.training.plan import make_plan
from lmlong.training.run import train

from .conftest import assert_resumes_exactly, lmlong, metrics

Recipes = Callable[..., Recipe]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in metrics(run) if "loss" in line]


@pytest.fixture
def teacher(recipe_of: Recipes, tmp_path: Path) -> Path:
    """A softmax model of another width, which has learned half of what the text could teach it."""
    train(recipe_of("model.attention.kind=softmax", "model.width=48"), tmp_path / "teacher")
    return tmp_path / "teacher"


@pytest.fixture
def taught(recipe_of: Recipes, teacher: Path) -> Recipes:
    """The tiny recipe with that teacher."""
    return lambda *overrides: recipe_of(f"training.teacher={teacher}", "training.teacher_share=0.9", *overrides)


def divergence(student: Path, teacher: Path) -> float:
    """The divergence of a trained student from a teacher, in nats a token."""
    ours, theirs = (load(run, "cpu") for run in (student, teacher))
    tokens = torch.tensor([ours.tokenizer.encode("the cat sat on the mat and then a bird flew over the dog")])
    starts = torch.zeros_like(tokens, dtype=torch.bool)
    with torch.no_grad():
        soft = Teacher(theirs.model, Softening(1.0, 1.0), theirs.tokenizer, theirs.weights_hash)
        loss, _, _ = taught_loss(ours.model, soft, tokens, tokens, starts)
    return float(loss) / tokens.numel()


def test_a_student_comes_nearer_to_its_teacher_than_one_without(
    taught: Recipes, recipe_of: Recipes, teacher: Path, tmp_path: Path
) -> None:
    train(taught("training.teacher_share=1", "training.steps=60"), tmp_path / "with")
    train(recipe_of("training.steps=60"), tmp_path / "without")
    assert divergence(tmp_path / "with", teacher) < 0.3 * divergence(tmp_path / "without", teacher)


def test_the_loss_that_is_told_is_that_of_the_text(taught: Recipes, recipe_of: Recipes, tmp_path: Path) -> None:
    train(taught("training.steps=1"), tmp_path / "with")
    train(recipe_of("training.steps=1"), tmp_path / "without")
    assert losses(tmp_path / "with") == losses(tmp_path / "without")  # before the first step they are one model


def test_the_teacher_is_in_no_checkpoint(taught: Recipes, recipe_of: Recipes, tmp_path: Path) -> None:
    for name, recipe in (("with", taught("training.steps=1")), ("without", recipe_of("training.steps=1"))):
        train(recipe, tmp_path / name)
    sizes = [
        sum(file.stat().st_size for file in (tmp_path / name / "checkpoints").glob("*/model.safetensors"))
        for name in ("with", "without")
    ]
    assert sizes[0] == sizes[1]


def test_it_is_the_same_in_segments_and_in_parts(taught: Recipes, tmp_path: Path) -> None:
    whole = taught("training.steps=6")
    train(whole, tmp_path / "whole")
    for name, options in {
        "segments": ["training.segment=16"],
        "parts": ["training.batch_size=2", "training.accumulate=2"],
        "checkpointing": ["training.activation_checkpointing=true"],
    }.items():
        train(taught("training.steps=6", *options), tmp_path / name)
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "whole"), rel=1e-4), name


@pytest.mark.parametrize("options", [[], ["training.segment=16", "training.teacher_temperature=2"]])
def test_it_resumes_exactly(taught: Recipes, tmp_path: Path, options: list[str]) -> None:
    assert_resumes_exactly(taught, tmp_path, *options)


def test_another_teacher_makes_another_run(taught: Recipes, recipe_of: Recipes, teacher: Path, tmp_path: Path) -> None:
    train(taught("training.steps=4"), tmp_path / "run")
    for change in ("training.teacher_share=0.2", "training.teacher_temperature=3", "training.teacher=null"):
        with pytest.raises(UsageError, match=f"--resume: {change.partition('=')[0]}"):
            train(taught("training.steps=8", change), tmp_path / "run", resume="auto")
    shutil.rmtree(teacher)
    train(recipe_of("training.steps=2"), teacher)
    with pytest.raises(UsageError, match="--resume: the teacher has changed"):
        train(taught("training.steps=8"), tmp_path / "run", resume="auto")


def test_two_processes_learn_what_one_does(taught: Recipes, tiny: Path, teacher: Path, tmp_path: Path) -> None:
    train(taught("training.steps=6"), tmp_path / "one")
    options = ["devices=2", "training.batch_size=2", "training.steps=6", "training.teacher_share=0.9"]
    child = lmlong("train", tiny, *options, f"training.teacher={teacher}", "--out", tmp_path / "two")
    _, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)


def test_the_tokenizer_is_that_of_the_teacher(recipe_of: Recipes, tmp_path: Path) -> None:
    pieces = "text.tokenizer={kind: sentencepiece, vocabulary: 300}"
    train(recipe_of(pieces, "training.steps=2"), tmp_path / "teacher")
    train(recipe_of("training.steps=2", f"training.teacher={tmp_path / 'teacher'}"), tmp_path / "student")
    files = [(tmp_path / name / "tokenizer.model").read_bytes() for name in ("teacher", "student")]
    assert files[0] == files[1]
    train(recipe_of("training.steps=2"), tmp_path / "bytes")
    with pytest.raises(UsageError, match=r"training\.teacher: .*teacher has another tokenizer"):
        start = f"training.init_from={tmp_path / 'bytes'}"
        train(recipe_of("training.steps=2", f"training.teacher={tmp_path / 'teacher'}", start), tmp_path / "both")


def test_a_teacher_that_cannot_teach_is_refused(recipe_of: Recipes, tmp_path: Path) -> None:
    train(recipe_of("objective=masked", "training.steps=1"), tmp_path / "encoder")
    with pytest.raises(UsageError, match="is an encoder"):
        train(recipe_of(f"training.teacher={tmp_path / 'encoder'}"), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    for options in (["objective=masked"], ["training.carry_state=true"], ["training.state_passing=0.5"]):
        with pytest.raises(RecipeError, match=r"training\.teacher"):
            recipe_of(f"training.teacher={tmp_path / 'encoder'}", *options)


def test_a_plan_counts_the_teacher(taught: Recipes, recipe_of: Recipes) -> None:
    large = "text.sequence_length=2048"
    alone, with_teacher = (make_plan(recipe(large)).cost.bytes for recipe in (recipe_of, taught))
    assert with_teacher > alone


def test_a_run_that_is_its_own_teacher_learns_nothing(recipe_of: Recipes, tmp_path: Path) -> None:
    base = tmp_path / "base"
    train(recipe_of("training.steps=12"), base)
    itself = (f"training.init_from={base}", f"training.teacher={base}")
    for share in (0.5, 1.0):
        train(recipe_of("training.steps=1", f"training.teacher_share={share}", *itself), tmp_path / str(share))
    norms = [metrics(tmp_path / str(share))[0]["gradient_norm"] for share in (0.5, 1.0)]
    assert norms[1] < 1e-4 * norms[0]


LAYERS = (
    "training.teacher_of=layers",
    "training.learning_rate=3e-3",
    "model.attention.feature_map=hedgehog",
    "model.convolution=4",
)


@pytest.fixture
def aligned(recipe_of: Recipes, tmp_path: Path) -> Recipes:
    """The tiny recipe with linear layers that learn to be those of a softmax model, from whose weights they begin."""
    start = tmp_path / "teacher"
    train(recipe_of("model.attention.kind=softmax", "model.convolution=0", "training.steps=40"), start)
    return lambda *more: recipe_of(*LAYERS, f"training.teacher={start}", f"training.init_from={start}", *more)


def test_layers_come_nearer_to_those_of_the_teacher(aligned: Recipes, recipe_of: Recipes, tmp_path: Path) -> None:
    result = train(aligned("training.steps=60", "training.validate_every=1"), tmp_path / "run")
    errors = losses(tmp_path / "run")
    assert errors[-1] < 0.5 * errors[0]
    bits = [line["validation"]["bits_per_byte"] for line in metrics(tmp_path / "run") if "validation" in line]
    assert bits[-1] < bits[0] and result.validation is not None
    assert "bits_per_byte" not in metrics(tmp_path / "run")[0]  # the error of layers is none


def test_only_mixers_are_trained_and_a_new_convolution_begins_as_the_identity(aligned: Recipes, tmp_path: Path) -> None:
    train(aligned("training.steps=1", "training.learning_rate=1e-30"), tmp_path / "still")
    train(aligned("training.steps=3"), tmp_path / "run")
    before, after = (read.read_weights(read.find(tmp_path / name)) for name in ("teacher", "run"))
    still = read.read_weights(read.find(tmp_path / "still"))
    moved = {name for name, weight in after.items() if not torch.equal(weight, before.get(name, still[name]))}
    assert moved == {name for name in after if ".mixer." in name}
    convolutions = [weight for name, weight in still.items() if "convolution" in name]
    assert len(convolutions) == 2
    for weight in convolutions:
        assert torch.allclose(weight, torch.eye(weight.shape[1])[-1].expand_as(weight), atol=1e-6)


def test_layers_of_the_teacher_itself_have_no_error(aligned: Recipes, recipe_of: Recipes, tmp_path: Path) -> None:
    aligned()
    same = (f"training.{key}={tmp_path / 'teacher'}" for key in ("teacher", "init_from"))
    recipe = recipe_of("model.attention.kind=softmax", "model.convolution=0", "training.teacher_of=layers", *same)
    train(recipe.model_copy(update={"training": recipe.training.model_copy(update={"steps": 1})}), tmp_path / "same")
    assert losses(tmp_path / "same")[0] < 1e-9


def test_aligning_resumes_exactly_and_is_the_same_in_parts(aligned: Recipes, tmp_path: Path) -> None:
    assert_resumes_exactly(aligned, tmp_path)
    parts = ["training.batch_size=2", "training.accumulate=2", "training.schedule=constant"]
    train(aligned(*parts), tmp_path / "smaller")
    assert losses(tmp_path / "smaller") == pytest.approx(losses(tmp_path / "whole"), rel=1e-3)
    train(aligned("training.activation_checkpointing=true", "training.schedule=constant"), tmp_path / "checkpointing")
    assert losses(tmp_path / "checkpointing") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


def test_two_processes_align_as_one_does(aligned: Recipes, tiny: Path, tmp_path: Path) -> None:
    train(aligned("training.steps=6"), tmp_path / "one")
    start = [f"training.{key}={tmp_path / 'teacher'}" for key in ("teacher", "init_from")]
    options = ["devices=2", "training.batch_size=2", "training.steps=6", *LAYERS, *start]
    child = lmlong("train", tiny, *options, "--out", tmp_path / "two")
    _, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["model.layers=3"], "the teacher has 2 layers of width 32, the model 3 of"),
        (["model.width=48"], "the teacher has 2 layers of width 32, the model 2 of width 48"),
        (["training.segment=16"], "segment=16: teacher_of: layers compares whole sequences"),
        (["training.strategy=deepspeed"], "strategy=deepspeed: deepspeed is not supported with teacher_of: layers"),
        (["training.teacher=null"], "training.teacher=null: teacher_of: layers needs one"),
        (["model.downsample={factor: 2, layers: 1}", "model.layers=3"], "the teacher has 2 layers"),
    ],
)
def test_layers_that_cannot_be_compared_are_refused(
    recipe_of: Recipes, tmp_path: Path, options: list[str], message: str
) -> None:
    train(recipe_of("training.steps=1"), tmp_path / "teacher")
    with pytest.raises((UsageError, RecipeError), match=message):
        train(recipe_of(*LAYERS, f"training.teacher={tmp_path / 'teacher'}", *options), tmp_path / "run")
