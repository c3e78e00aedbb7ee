"""Ordinary troubles of a machine: each is one message with path and remedy, and the right exit code."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from machine import largest_file

from lmlong.attention.base import state_tensors
from lmlong.model.base import count_parameters
from lmlong.model.build import build, least_bytes
from lmlong.recipe import file as recipe_file
from lmlong.training.callbacks import TrainingCallback

from .conftest import Command

EVAL = ("eval", "run", "--lengths", "8", "--min-documents", "1", "--by", "position")
FULL = "No space left on device. Free some space, or choose a path on another disk."
LIMITED = {
    "data info mine.yaml text.validation.fraction=0.3": (
        100,
        r"error: \S+/cache/.*Set LMLONG_CACHE to a folder of your",
    ),
    "train mine.yaml --out full": (4000, "error: full/checkpoints/step-00000001: File too large."),
    "generate run --prompt a --max-tokens 1 --save-state a.state": (
        4000,
        r"^error: a\.state: File too large\. Raise the limit of file sizes \(ulimit -f\), or choose another disk\.\n$",
    ),
}


def test_full_disk_is_reported(lmlong: Command, place: Path) -> None:
    (place / "full.png").symlink_to("/dev/full")
    for words, file in ((("--json", "/dev/full"), "/dev/full"), (("--plot", "full.png"), "full.png")):
        code, _, told = lmlong(*EVAL, *words)
        assert (code, told.strip()) == (1, f"error: {file}: {FULL}")
    for line, (size, message) in LIMITED.items():
        with largest_file(size):
            code, _, told = lmlong(*line.split())
        assert code == 1 and re.search(message, told), told
    assert not list(place.glob("*.state")) and not list(place.glob(".*partial"))


STREAMS = {
    "lmlong recipe options > /dev/full": (1, "error: standard output: No space left on device."),
    "lmlong recipe check nosuch 2>&-": (2, ""),
    "lmlong recipe list <&-": (0, ""),
    "lmlong generate run --prompt a --max-tokens 3 --stats 2>/dev/full <&-": (0, ""),
}


@pytest.mark.parametrize("line", STREAMS)
def test_full_or_closed_streams_are_reported(place: Path, line: str) -> None:
    command = f'lmlong() {{ {shlex.quote(sys.executable)} -m lmlong "$@"; }}\n{line}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, cwd=place)
    code, message = STREAMS[line]
    assert done.returncode == code and done.stderr.startswith(message) and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("\n") == bool(message)
    assert bool(done.stdout) == (code == 0), "messages never go to standard output"
    assert "--max-tokens 3" not in line or len(done.stdout) <= 12


def test_cache_that_is_a_file_is_refused(lmlong: Command, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMLONG_CACHE", str(place / "book.txt"))
    code, _, told = lmlong("data", "info", "mine.yaml")
    assert code == 2 and f"error: {place}/book.txt/tokens/" in told and "Not a directory. Set LMLONG_CACHE" in told


def test_missing_home_is_not_created(lmlong: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    monkeypatch.delenv("LMLONG_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert lmlong("data", "info", "mine.yaml") == (
        2,
        "",
        "error: there is no home folder for the cache. Set LMLONG_CACHE to a folder of your own.\n",
    )
    assert Path(os.environ["XDG_CACHE_HOME"]).is_dir()  # for libraries that would make a home
    assert os.environ["XDG_CONFIG_HOME"] == str(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "optimizer", "numbers"),
    [("linear", "adamw", 4), ("window", "muon", 3)],
)
def test_estimate_knows_the_size_of_the_model(place: Path, kind: str, optimizer: str, numbers: int) -> None:
    options = ["model.layers=3", f"model.attention.kind={kind}", f"training.optimizer={optimizer}"]
    recipe = recipe_file.load(str(place / "mine.yaml"), options)
    model = build(recipe, 258)
    state = sum(tensor.nbytes for tensor in state_tensors(model.init_state(2)))
    blocks = 2 * 16 * (8 + 3 * 2 * 16)  # tokens, and the input of each block in bfloat16
    assert least_bytes(recipe, 258) == (4 * numbers * count_parameters(model), blocks + state)


def test_lack_of_memory_exits_with_1(lmlong: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmlong.cli.recipe.load_recipe", lambda name, overrides: torch.empty(1 << 60))
    code, _, told = lmlong("recipe", "check", "quickstart")
    assert code == 1 and told.startswith("error: out of memory: 4611686018427387904 bytes could not be allocated. "), (
        told
    )


def test_moved_run_folder_ends_training(
    place: Path, lmlong: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun = TrainingCallback.on_train_start

    def moved(self: TrainingCallback, *arguments: object) -> None:
        begun(self, *arguments)  # type: ignore[arg-type]
        (place / "moving").rename(tmp_path / "elsewhere")

    monkeypatch.setattr(TrainingCallback, "on_train_start", moved)
    code, _, told = lmlong("train", "mine.yaml", "--out", "moving")
    assert code == 1 and "error: moving: the run folder was moved or removed while it trained. Resume" in told, told
    assert not (place / "moving").exists()
