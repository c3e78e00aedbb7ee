"""The real DeepSpeed, on CPUs: what it trains is what training without it does, at every stage, and ends in the same
files."""

import json
import os
from pathlib import Path

import pytest
import torch

import lmlong
from lmlong.checkpoint import read
from lmlong.errors import UsageError
from lmlong.recipe import Recipe
from lmlong.training.deepspeed_strategy import LEFT_BEHIND
from lmlong.training.run import train

from .conftest import TEACHER, Recipes, Trains, losses, metrics, of_run, sharded, train_in_processes, weights

STEPS = (
    "training.clip=0.05",  # far below the gradients, so that their scale would show
    "training.checkpoint_every=3",
    "training.keep_last=9",
    "training.schedule=constant",
    "text.validation.fraction=0.2",
)
ALONE = (*STEPS, "training.batch_size=2", "training.accumulate=4")
SHORT = (*ALONE, "training.steps=6")
TWO = (*STEPS, "training.batch_size=2", "training.accumulate=2", "devices=2")


@pytest.fixture(scope="module", params=["muon"])
def alone(request: pytest.FixtureRequest, train_shared: Trains) -> Path:
    """A run without DeepSpeed, by default with Muon."""
    return train_shared(f"alone with {request.param}", *ALONE, f"training.optimizer={request.param}")


def resume_at_six(recipe: Recipe, whole: Path, folder: Path) -> Path:
    """Repeat the second half of a run into another folder."""
    train(recipe, folder, resume=str(whole / "checkpoints" / "step-00000006"))
    return folder


def assert_close(some: Path, others: Path) -> None:
    """Both runs are the same one, but for rounding."""
    assert losses(some) == pytest.approx(losses(others), rel=1e-4)
    some_norms, other_norms = (
        [line["gradient_norm"] for line in metrics(run) if "loss" in line] for run in (some, others)
    )
    assert some_norms == pytest.approx(other_norms, rel=1e-2)
    mine = weights(some)
    for name, truth in weights(others).items():
        assert float((mine[name] - truth).norm()) < 2e-3 * float(truth.norm()) + 1e-4, name


# stage 3, which has all that the others have, stands for them in the usual suite
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3])
def test_two_processes_are_one_run(
    tiny: Path, alone: Path, recipe_of: Recipes, tmp_path: Path, stage: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """They resume a run without DeepSpeed, and such a run resumes theirs."""
    whole, options = tmp_path / "whole", [*TWO, "training.segment=16", *sharded(stage, tmp_path)]
    middle = alone / "checkpoints" / "step-00000003"
    _, errors = train_in_processes(tiny, whole, *options, "--resume", middle)
    assert "Warning" not in errors
    assert_close(whole, alone)
    assert {path.name for path in (whole / "checkpoints" / "step-00000006").iterdir()} == {
        *("model.safetensors", "training.safetensors", "training.json"),
        *("manifest.json", "recipe.yaml", "tokenizer.model"),
    }
    capsys.readouterr()
    fewer = resume_at_six(recipe_of(*TWO, "devices=1"), whole, tmp_path / "fewer")
    assert "changed since the checkpoint: training.accumulate from 2 to 4" in capsys.readouterr().err
    assert_close(fewer, whole)
    assert "".join(lmlong.load(str(fewer)).stream("the ", max_tokens=20))


@pytest.mark.parametrize(
    ("stage", "alone"),
    [(1, "muon"), pytest.param(2, "muon", marks=pytest.mark.slow), pytest.param(3, "muon", marks=pytest.mark.slow),
     (2, "adamw"), (3, "adamw")],
    indirect=["alone"],
)  # fmt: skip
def test_run_begun_without_deepspeed_is_resumed_with_it(
    alone: Path, recipe_of: Recipes, tmp_path: Path, stage: int, capsys: pytest.CaptureFixture[str]
) -> None:
    optimizer = f"training.optimizer={read.read_recipe(read.find(alone)).training.optimizer}"
    before = dict(os.environ)
    resumed = resume_at_six(recipe_of(*ALONE, optimizer, *sharded(stage, tmp_path)), alone, tmp_path / "resumed")
    assert {name for name in LEFT_BEHIND if os.environ.get(name) != before.get(name)} == set()
    assert "changed since the checkpoint: training.strategy from auto to deepspeed" in capsys.readouterr().err
    assert_close(resumed, alone)


OPTIONS = {
    "softmax": ["model.attention.kind=softmax", "model.convolution=0", "training.activation_checkpointing=true"],
    "taylor": ["model.attention.feature_map=taylor", "model.attention.decay=fixed", "model.dropout=0.1"],
    "favor": ["model.attention.feature_map=favor", "training.activation_checkpointing=true", "training.segment=16"],
    "window": ["model.attention.kind=[window, linear]", "model.attention.window=20", "training.carry_state=true"],
    "a teacher": [TEACHER, "training.segment=16"],
    "encoder": ["objective=masked", "model.attention.kind=linformer", "model.attention.linformer.projected=16"],
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("softmax", "encoder") else pytest.mark.slow) for name in OPTIONS]
)
def test_divided_weights_train_the_same(recipe_of: Recipes, softmax: Path, tmp_path: Path, name: str) -> None:
    options = [*SHORT, *of_run(OPTIONS[name], softmax)]
    train(recipe_of(*options), tmp_path / "alone")
    divided = [*options, *sharded(3, tmp_path)]
    if name == "encoder":
        train(recipe_of(*divided, "training.steps=4"), tmp_path / "sharded")
    train(recipe_of(*divided), tmp_path / "sharded", resume="auto")
    assert_close(tmp_path / "sharded", tmp_path / "alone")


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_bfloat16_rounds_products_not_weights(alone: Path, recipe_of: Recipes, tmp_path: Path, stage: int) -> None:
    options = [*SHORT, "training.precision=bf16"]
    train(recipe_of(*options), tmp_path / "alone")
    train(recipe_of(*options, *sharded(stage, tmp_path)), tmp_path / "sharded")
    assert losses(tmp_path / "sharded") == pytest.approx(losses(tmp_path / "alone"), rel=1e-3)
    assert losses(tmp_path / "sharded") != pytest.approx(losses(alone)[:6], rel=1e-6)
    assert {tensor.dtype for tensor in weights(tmp_path / "sharded").values()} == {torch.float32}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_small_model_takes_little_memory(recipe_of: Recipes, tmp_path: Path, stage: int) -> None:
    """Even of what it is given and never touches, by which a process may become too large to be forked."""
    train(recipe_of("training.steps=1", *sharded(stage, tmp_path)), tmp_path / "first")
    before = address_space()
    train(recipe_of("training.steps=1", *sharded(stage, tmp_path)), tmp_path / "second")
    assert address_space() - before < 1 << 30


def address_space() -> int:
    """Bytes of all that this process has mapped."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize"))
    return int(line.split()[1]) << 10


SETTINGS: list[tuple[dict, str]] = [
    ({"bf16": {"enabled": True}}, "bf16 comes from the recipe's training.precision"),
    ({"zero_optimization": {"stage": 1}}, "zero_optimization.stage comes from the recipe's training.deepspeed.sta"),
    (
        {"zero_optimization": {"round_robin_gradients": True}},
        "zero_optimization.round_robin_gradients is True: it puts",
    ),
    ({"zero_optimization": {"parameter_alignment": True}}, "zero_optimization.parameter_alignment is True: it pads"),
    ({"zero_optimization": {"zero_hpz_partition_size": 2}}, "zero_optimization.zero_hpz_partition_size is 2"),
    (
        {"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}},
        r"zero_optimization.zenflow is \{.*mix up the weights. Rem",
    ),
    ({"zero_optimization": "x"}, "zero_optimization is 'x', not an object"),
    ({"zero_optimization": {"reduce_bucket_size": "x"}}, r"zero_optimization is \{.*valid integer"),
    ({"steps_per_print": 9, "wall_clock_breakdown": "x"}, "wall_clock_breakdown is 'x', which DeepSpeed cannot read"),
]


def test_wrong_settings_are_refused(recipe_of: Recipes, tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    options = ["training.strategy=deepspeed", f"training.deepspeed.config={file}"]
    for settings, message in SETTINGS:
        file.write_text(json.dumps(settings))
        with pytest.raises(UsageError, match=rf"training\.deepspeed\.config: {file}: {message}"):
            train(recipe_of(*options), tmp_path / "run")
    file.write_text("[1")
    with pytest.raises(UsageError, match="not a JSON object"):
        train(recipe_of(*options), tmp_path / "run")
    file.unlink()
    with pytest.raises(UsageError, match="No such file"):
        train(recipe_of(*options), tmp_path / "run")
    assert not (tmp_path / "run").exists()
