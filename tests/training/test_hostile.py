"""Checkpoints that are signed but malformed: each is refused by name when a run would resume from it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.conftest import sign
from grids import thinned
from safetensors.torch import save_file
from torch.amp import GradScaler

from lmlong.checkpoint import manifest, read, write
from lmlong.checkpoint.manifest import RECIPE, TOKENIZER, TRAINING_TENSORS, TRAINING_VALUES, WEIGHTS
from lmlong.errors import CheckpointError
from lmlong.inference.loading import load
from lmlong.training.resume import prepare_resumed_run, resume_point
from lmlong.training.run import train

from .conftest import Recipes


@pytest.fixture
def checkpoint(run: Path) -> Path:
    return read.find(run)


def refused(checkpoint: Path, recipe_of: Recipes, loads: bool = False) -> None:
    """Neither resumed from, nor loaded where that reads what is wrong."""
    sign(checkpoint)
    with pytest.raises(CheckpointError):
        prepare_resumed_run(recipe_of(), resume_point(checkpoint.parents[1], str(checkpoint)))  # type: ignore[arg-type]
    if not loads:
        with pytest.raises(CheckpointError):
            load(checkpoint, "cpu")


def test_refused_checkpoint_begins_no_run(checkpoint: Path, recipe_of: Recipes) -> None:
    sign(checkpoint, step=7)
    before, new = sorted(checkpoint.parents[1].rglob("*")), checkpoint.parents[2] / "new"
    with pytest.raises(CheckpointError, match="its manifest has another step"):
        train(recipe_of(), new, resume=str(checkpoint))
    assert not new.exists() and sorted(checkpoint.parents[1].rglob("*")) == before


def poked(tensor: torch.Tensor, value: float) -> torch.Tensor:
    return tensor.flatten().index_fill(0, torch.tensor([0]), value).view(tensor.shape)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda w: w.bool(), "embedding.weight"),
        (lambda w: w.to(torch.complex64), "blocks.0.mlp.norm.weight"),
        (lambda w: w.to(torch.int32), "embedding.weight"),
        (lambda w: poked(w, NAN), "blocks.0.mlp.norm.weight"),
        (lambda w: poked(w, -INF), "embedding.weight"),
        (lambda w: w[:-1].contiguous(), "blocks.0.mlp.norm.weight"),
        (lambda w: w[None].contiguous(), "embedding.weight"),
        (lambda w: w.reshape(2, -1), "blocks.0.mlp.norm.weight"),
        (lambda w: torch.zeros(0), "embedding.weight"),
    ],
)
def test_malformed_weights_are_refused(checkpoint: Path, recipe_of: Recipes, change: Callable, name: str) -> None:
    weights = read.read_weights(checkpoint)
    save_file({**weights, name: change(weights[name])}, checkpoint / WEIGHTS)
    refused(checkpoint, recipe_of)


@pytest.mark.parametrize("missing", [WEIGHTS, TRAINING_TENSORS, TRAINING_VALUES, RECIPE, TOKENIZER, None])
def test_unlisted_files_are_refused(checkpoint: Path, recipe_of: Recipes, missing: str | None) -> None:
    for name in manifest.FILES if missing is None else (missing,):
        (checkpoint / name).unlink()
    refused(checkpoint, recipe_of, loads=missing in (TRAINING_TENSORS, TRAINING_VALUES))


@thinned(
    pytest.mark.parametrize("name", [RECIPE, TOKENIZER]),
    pytest.mark.parametrize("text", [b"", b"\x00" * 50, b"[[[", b"a: &a [*a]", b"training: {steps: 1, no: 2}"]),
)
def test_malformed_recipe_or_tokenizer_is_refused(checkpoint: Path, recipe_of: Recipes, name: str, text: bytes) -> None:
    (checkpoint / name).write_bytes(text)
    refused(checkpoint, recipe_of)


FIRST, SQUARES = "optimizer.0.exp_avg", "optimizer.0.exp_avg_sq"
PARTS = ("step", FIRST, "scaler", "skipped", "recent", "text")

STATES: dict[str, Callable[[dict], Any]] = {
    "empty": lambda s: {},
    **{f"without {part}": lambda s, part=part: {k: v for k, v in s.items() if k != part} for part in PARTS},
    **{f"{part} a list of text": lambda s, part=part: {**s, part: ["x"]} for part in PARTS},
    "step negative": lambda s: {**s, "step": -3},
    "step true": lambda s: {**s, "step": True},
    "step a fraction": lambda s: {**s, "step": 2.5},
    "a weight missing": lambda s: {k: v for k, v in s.items() if not k.startswith("optimizer.0.")},
    "a weight too many": lambda s: {**s, "optimizer.999.exp_avg": s[FIRST]},
    "another moment": lambda s: {**s, "optimizer.0.max_exp_avg_sq": s[FIRST]},
    **{f"moment {kind}": lambda s, name=name, change=change: {**s, name: change(s[name])}
       for kind, name, change in (
           ("of another shape", FIRST, lambda m: m[:1]),
           ("NaN", FIRST, lambda m: poked(m, NAN)),
           ("negative", SQUARES, lambda m: poked(m, -1.0)),
           ("bool", FIRST, lambda m: m.bool()),
           ("no tensor", FIRST, lambda m: 3.0),
           ("with steps for each", "optimizer.0.step", lambda m: torch.ones(3)),
       )},
    "rows without tables": lambda s: {**s, "row_squares": torch.ones(3)},
    "skipped negative": lambda s: {**s, "skipped": -1},
    **{f"seconds {value}": lambda s, value=value: {**s, "seconds": value}
       for value in (-1.0, NAN, INF, 1e308, 3, "long")},
    **{f"scale {value}": lambda s, value=value: {**s, "scaler": {**GradScaler("cpu").state_dict(), "scale": value}}
       for value in (NAN, 10**400, True)},
    "losses not finite": lambda s: {**s, "recent": [NAN]},
    "carried NaN": lambda s: {**s, "carried.0": torch.tensor(NAN)},
    "carried with a gap": lambda s: {**s, "carried.1": torch.ones(1)},
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_malformed_training_state_is_refused(checkpoint: Path, recipe_of: Recipes, name: str) -> None:
    write.save_training(STATES[name](read.read_training(checkpoint)), checkpoint)
    refused(checkpoint, recipe_of, loads=True)


def test_carried_states_of_another_model_are_refused(recipe_of: Recipes, tmp_path: Path) -> None:
    train(recipe_of("training.steps=2", "training.carry_state=true"), tmp_path / "run")
    checkpoint = read.find(tmp_path / "run")
    state = read.read_training(checkpoint)
    *carried, last = (name for name in state if name.startswith("carried."))
    fewer = {name: value for name, value in state.items() if name != f"carried.{len(carried)}"}
    for number, changed in enumerate((fewer, {**state, last: state[last][..., None]})):
        write.save_training(changed, checkpoint)
        sign(checkpoint, step=2)
        with pytest.raises(CheckpointError, match="carried"):
            train(recipe_of("training.carry_state=true"), tmp_path / f"new-{number}", resume=str(checkpoint))


def test_sound_checkpoint_is_resumed(checkpoint: Path, recipe_of: Recipes) -> None:
    scaled = {**read.read_training(checkpoint), "scaler": GradScaler("cpu").state_dict()}  # as in float16
    write.save_training(scaled, checkpoint)
    sign(checkpoint)
    assert read.trained_tokens(checkpoint) == 4 * 256, "which follows from the steps"
    assert train(recipe_of("training.steps=5"), checkpoint.parents[2] / "new", resume=str(checkpoint)).step == 5
