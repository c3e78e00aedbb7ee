"""The conversion of a softmax model: its stages, what it refuses, what it reports, and that it can be stopped."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import Finished, lmlong

from lmlong.checkpoint import read
from lmlong.checkpoint.location import BEST
from lmlong.recipe import file as recipe_file
from lmlong.training import conversion, conversion_report
from lmlong.training.run import train

from .conftest import Recipes, ignored, same_tensors

STEPS = [
    "training.steps=10",
    "conversion={layers: {steps: 80}, predictions: {steps: 40, learning_rate: 3e-3}, sequence_length: 32}",
]
HYBRID = ["model.attention.kind=[window, linear]", "model.attention.window=8", "model.attention.feature_map=hedgehog"]


@pytest.fixture(scope="module")
def folder(tiny: Path, recipe_of: Recipes, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipe and the softmax run `teacher`."""
    folder = tmp_path_factory.mktemp("conversions")
    (folder / "tiny.yaml").write_text(tiny.read_text())
    train(recipe_of("model.attention.kind=softmax", "training.steps=150", "seed=1"), folder / "teacher")
    return folder


def convert(folder: Path, *words: str, code: int = 0) -> Finished:
    """Stages are trained in this process; in processes of their own they are in a test that stops them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "_train", train_here)
        done = lmlong("convert", "teacher", "--to", "tiny.yaml", *words, cwd=folder)
    assert done.returncode == code, done.stderr
    return done


def train_here(stage: conversion.StageRun, overwrite: bool) -> int:
    train(stage.recipe, stage.folder, resume="auto" if stage.folder.is_dir() else None)
    return 0


@pytest.fixture(scope="module")
def converted(folder: Path) -> dict[str, dict]:
    """The points of a conversion, by name."""
    done = convert(folder, *HYBRID, *STEPS, "--out", "student", "--json", "points.json")
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "teacher" in done.stdout and "swapped" in done.stdout
    return {point["name"]: point for point in json.loads((folder / "points.json").read_text())}


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    """The weights of the best checkpoint."""
    return read.read_weights(read.find(run, BEST))


def bits(point: dict) -> float:
    return point["totals"]["nats"] / point["totals"]["bytes"]


def test_each_stage_approaches_the_teacher(converted: dict[str, dict]) -> None:
    assert list(converted) == ["teacher", "swapped", "layers", "predictions", "text"]
    loss = {name: bits(point) for name, point in converted.items()}
    error = {name: sum(point["layers"]) for name, point in converted.items() if point["layers"]}
    assert error["layers"] < 0.8 * error["swapped"]  # 0.44 to 0.71, by seed and processor
    gap = {name: each - loss["teacher"] for name, each in loss.items()}
    assert gap["layers"] < 0.2 * gap["swapped"] and gap["predictions"] < 0.2 * gap["swapped"]


def test_loss_without_recurrence_is_that_of_zero_outputs(folder: Path, converted: dict[str, dict]) -> None:
    point = converted["text"]
    loss = loss_with(folder / "student", {"blocks.1.mixer.out_proj.weight": torch.zeros(32, 32)})
    assert point["without_recurrence"]["nats"] == pytest.approx(loss, rel=1e-5)
    assert point["without_recurrence"]["nats"] != pytest.approx(point["totals"]["nats"], rel=1e-3)
    assert point["recurrent_shares"] is None


def test_recurrence_beside_a_window_has_a_share(folder: Path) -> None:
    words = ["model.attention={kind: linear, parallel_window: 8}", "training.steps=1"]
    words += ["conversion={layers: {steps: 40}, predictions: {steps: 1}, sequence_length: 32}", "--out", "beside"]
    done = convert(folder, *words, "--json", "beside.json")
    assert "recurrences contribute " in done.stdout
    *_, point = json.loads((folder / "beside.json").read_text())
    weights = weights_of(folder / "beside")
    of_windows = {name: bias + 100 for name, bias in weights.items() if name.endswith(".window_share.bias")}
    assert point["without_recurrence"]["nats"] == pytest.approx(loss_with(folder / "beside", of_windows), rel=1e-5)
    assert point["without_recurrence"]["nats"] != pytest.approx(point["totals"]["nats"], rel=1e-5)
    assert len(point["recurrent_shares"]) == len(of_windows) == 2
    assert all(0.02 < share < 0.98 for share in point["recurrent_shares"])


def loss_with(run: Path, changed: dict[str, torch.Tensor]) -> float:
    """The summed loss of a run's model with other weights, as a conversion measures it."""
    recipe, weights = read.read_recipe(read.find(run, BEST)), weights_of(run)
    tokens = conversion_report.prepare(recipe.text, read.read_tokenizer(read.find(run, BEST)))
    model = conversion_report.build(recipe, tokens.tokenizer.vocabulary)
    model.load_state_dict(weights | changed)
    short = recipe.model_copy(update={"text": recipe.text.model_copy(update={"sequence_length": 32})})
    text = conversion_report.CausalDataModule(short, tokens).validation(recipe.training.validation_tokens)
    token_bytes = torch.from_numpy(tokens.tokenizer.token_bytes)
    return conversion_report.loss_totals(model, map(conversion_report.batch_tensors, text), token_bytes).nats


def test_each_stage_has_its_options(folder: Path) -> None:
    """And reads as many tokens."""
    options = ["training.batch_size=2", "training.carry_state=true", "text.sequence_length=64"]
    options += ["conversion={sequence_length: 16, predictions: {sequence_length: 64, state_passing: 0.5, steps: 3}}"]
    recipe = recipe_file.load(str(folder / "tiny.yaml"), [*options, "training.quantize=int4"])
    stages = [stage.recipe for stage in conversion.stages(recipe, "teacher", folder / "none")]

    def of_training(name: str) -> list[object]:
        return [getattr(stage.training, name) for stage in stages]

    assert [stage.text.sequence_length for stage in stages] == [16, 64, 64]
    assert of_training("batch_size") == [8, 2, 2]
    assert of_training("state_passing") == [0, 0.5, 0]
    assert of_training("carry_state") == [False, False, True]
    assert of_training("quantize") == [None, None, "int4"]
    assert of_training("teacher_of")[:2] == ["layers", "predictions"]
    assert stages[2].training.teacher is None


def test_window_of_a_whole_sequence_is_softmax(folder: Path) -> None:
    words = ["model.attention.kind=window", "model.attention.window=64", "training.steps=2", "--out", "near", "--json"]
    done = convert(folder, *words, "-", "conversion={layers: null, predictions: null}")
    assert not list(folder.glob("near-*"))
    points = {point["name"]: point for point in json.loads(done.stdout)}
    assert list(points) == ["teacher", "swapped", "text"]
    nats = {name: point["totals"]["nats"] for name, point in points.items()}
    assert nats["swapped"] == pytest.approx(nats["teacher"], rel=1e-6)
    assert max(points["swapped"]["layers"]) < 1e-5
    assert nats["text"] != nats["swapped"]


def test_finished_conversion_is_not_repeated(folder: Path, converted: dict) -> None:
    weights = weights_of(folder / "student")
    again = convert(folder, *HYBRID, *STEPS, "--out", "student", "--resume", "--json", "-")
    assert "has no more to do" not in again.stdout  # the result alone
    assert json.loads(again.stdout)[-1]["totals"] == converted["text"]["totals"]
    assert same_tensors(weights_of(folder / "student"), weights)


def test_failing_stage_ends_a_conversion(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    works, fails = (
        recipe_file.load(str(folder / "tiny.yaml"), ["training.steps=2", *more])
        for more in ([], ["training.init_from=/nowhere"])
    )
    first = conversion.StageRun("first", works, folder / "first")
    second = conversion.StageRun("second", fails, folder / "second")
    assert conversion.train_stages([first, second, first], overwrite=False) == 4
    output, errors = capfd.readouterr()
    assert read.find(folder / "first", BEST).name == "step-00000002" and not (folder / "second").exists()
    assert output == "" and "stage 2 of 3: second, in " in errors and "stage 3" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_conversion_resumes_exactly(folder: Path, converted: dict, number: signal.Signals) -> None:
    name = f"stopped-{number.name}"
    words = [*HYBRID, *STEPS, "--out", name]
    command = [sys.executable, "-m", "lmlong", "convert", "teacher", "--to", "tiny.yaml", *words]
    with ignored(signal.SIGINT):
        child = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with child:
        assert child.stderr is not None
        for line in child.stderr:
            if "/80: loss" in line:
                child.send_signal(number)
                break
        child.communicate()
    assert child.returncode == 128 + number
    assert not (folder / name).exists()
    convert(folder, *words, code=2)  # --resume was left out
    convert(folder, *words, "--resume")
    assert same_tensors(weights_of(folder / "student"), weights_of(folder / name))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.width=48"], "model.width: 48 here and 32 in teacher"),
        (["model.layers=3"], "model.layers: 3 here and 2 in teacher"),
        (["model.attention.kind=softmax"], "nothing to convert"),
        (["conversion.layers.steps=0"], "conversion.layers.steps"),
        (["text.sequence_length=100000"], "one sequence needs 100,001"),
        (["conversion.sequence_length=48"], "not a multiple of 48"),
        (["conversion.predictions.sequence_length=48"], "not a multiple of 48"),
        (["training.teacher=teacher"], "training.teacher"),
        (["devices=2", "training.sequence_parallel=2"], "learns from a teacher, which reads whole rows"),
        (["--resume", "--overwrite"], "Leave out one"),
        (["objective=masked", "model.attention.kind=linear"], "an encoder"),
    ],
)
def test_impossible_conversion_is_refused(folder: Path, words: list[str], message: str) -> None:
    refused = convert(folder, *words, "--out", "never", code=2)
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr and not list(folder.glob("never*"))


@pytest.mark.slow
def test_dry_run_measures_each_stage(folder: Path) -> None:
    planned = convert(folder, *HYBRID, *STEPS, "--out", "planned", "--dry-run", "--json", "-")
    stages = json.loads(planned.stdout)
    assert list(stages) == ["layers", "predictions", "text"]
    assert all(stage["length"] == stage["longest"] and stage["run_seconds"] > 0 for stage in stages.values())
    assert not list(folder.glob("planned*"))


def test_student_learns_from_text_of_the_teacher(folder: Path) -> None:
    """As the guide makes it. And added heads are trained after the first stage."""
    (folder / "prompts.jsonl").write_text('""\n' * 40)
    written = lmlong("generate", "teacher", "--prompts", "prompts.jsonl", "--max-tokens", 32, "--json", cwd=folder)
    (folder / "own.jsonl").write_text(written.stdout)
    texts = {json.loads(line)["text"] for line in written.stdout.splitlines()}
    assert len(texts) > 25 and any("the" in text for text in texts)
    words = [*HYBRID, *STEPS, "training.steps=2", "conversion.layers.steps=2", "conversion.predictions.steps=2"]
    words += ["model.add_ngram=[2]", "model.attention.ngram.buckets=64"]
    convert(folder, *words, "text.validation.fraction=0.2", "text.sources.0.paths=own.jsonl", "--out", "sampled")
    stages = [folder / f"sampled{stage}" for stage in ("-layers", "-predictions", "")]
    heads = [bool(weights_of(run)["blocks.1.ngram.out_proj.weight"].any()) for run in stages]
    assert heads == [False, True, True]
