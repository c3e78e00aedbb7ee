"""Processes that others start, torchrun on two machines, as this one plays them, and SLURM; rows read in parts."""

import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lmlong.attention.plugins import load_plugin, unload_plugin
from lmlong.errors import UsageError
from lmlong.training.distributed import check_launch, is_main_process
from lmlong.training.prepare import prepare_new_run
from lmlong.training.run import train

from .conftest import Recipes, logged_steps, losses, metrics, train_in_processes


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def together(command: list[object], environments: list[dict[str, str]]) -> list[tuple[int, str, str]]:
    """Run a command in several environments at the same time: the exit code, output and messages of each."""
    children = [
        subprocess.Popen(
            [sys.executable, "-m", *map(str, command)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in environments
    ]
    try:
        printed = [child.communicate(timeout=120) for child in children]
    finally:
        for child in children:
            child.kill()
    return [(child.returncode, *texts) for child, texts in zip(children, printed, strict=True)]


def succeed(command: list[object], environments: list[dict[str, str]]) -> tuple[list[str], str]:
    """What each of several processes printed, none of which may fail, and the messages of all."""
    results = together(command, environments)
    assert all(code == 0 for code, _, _ in results), results
    return [output for _, output, _ in results], "".join(errors for _, _, errors in results)


def tasks_of_slurm() -> list[dict[str, str]]:
    """The variables by which srun tells each of two tasks what it is, and nothing else does."""
    job = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_NODEID": "0",
           "SLURM_JOB_NAME": "books", "SLURM_NODELIST": "127.0.0.1", "MASTER_PORT": str(free_port())}  # fmt: skip
    return [{**job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]


@pytest.mark.slow
def test_slurm_tasks_pass_over_a_damaged_checkpoint(tiny: Path, recipe_of: Recipes, tmp_path: Path) -> None:
    """Only the first task verifies digests and moves the checkpoint aside: if the second one has read it before that,
    neither trains, and the next start resumes from the checkpoint before."""
    run = tmp_path / "run"
    train(recipe_of("training.keep_last=5"), run)
    damaged = run / "checkpoints" / "step-00000012" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-4] + b"abcd")
    two = ["devices=2", "training.batch_size=2", "training.steps=14", "training.keep_last=5", "--resume", "auto"]
    command = ["lmlong", "train", tiny, *two, "--out", run]
    results = together(command, tasks_of_slurm())
    if any(code for code, _, _ in results):
        assert all(code and "have read different checkpoints" in errors for code, _, errors in results), results
        succeed(command, tasks_of_slurm())
    assert logged_steps(run) == list(range(1, 15))


TASKS_OF_TWO = {"SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"}
BOOKS = {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "books"}

LAUNCHES = [
    (
        {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4"},
        [],
        "torchrun started 4 processes, but the recipe has nodes: 1 w",
    ),
    (BOOKS, ["devices=3"], "srun started 2 processes"),
    ({"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}, ["nodes=2"], "srun started 2 processes on each machine"),
    (
        TASKS_OF_TWO,
        ["nodes=2", "devices=2", "training.sequence_parallel=2"],
        "srun made rank 1 process 0 of machine 1, so neighbouring ranks, .* Give srun --distribution=block",
    ),
    ({}, ["nodes=2"], "2 machines do not start each other. On each of them run torchrun --nnodes 2 --nproc-per-node 1"),
    ({"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "bash"}, ["nodes=2"], "do not start each other"),
    ({}, ["devices=1024"], r"devices: 1024 processes, but this machine has \d+ (cores|GPUs)\. Use at most \d+\."),
]


@pytest.mark.parametrize(("environment", "options", "message"), LAUNCHES)
def test_wrong_number_of_processes_is_refused(
    recipe_of: Recipes, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], options: list[str], message: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=message):
        check_launch(recipe_of(*options))


def test_ranks_of_a_row_are_neighbours(recipe_of: Recipes, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NTASKS": "4", "PROCID": "3", "NODEID": "1", "LOCALID": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    check_launch(recipe_of("nodes=2", "devices=2", "training.sequence_parallel=2"))


@pytest.mark.parametrize(("job", "is_main"), [("bash", False), ("books", True)])
def test_shell_of_slurm_starts_its_own_processes(monkeypatch: pytest.MonkeyPatch, job: str, is_main: bool) -> None:
    for name, value in {"NTASKS": "1", "PROCID": "0", "JOB_NAME": job}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert is_main_process() == is_main


ROWS = ("text.sequence_length=61", "training.batch_size=2", "training.steps=8", "training.schedule=constant")


def parts(number: int, *options: str) -> tuple[str, ...]:
    return *ROWS, f"devices={number}", f"training.sequence_parallel={number}", *options


@pytest.mark.slow
def test_short_documents_are_read_in_parts(tiny: Path, recipe_of: Recipes, tmp_path: Path) -> None:
    """Batches have different lengths."""
    draw, book = random.Random(1), tiny.with_name("book.txt").read_text()
    (tmp_path / "books").mkdir()
    for number in range(40):
        begin = draw.randrange(len(book) // 2)
        (tmp_path / "books" / f"{number}.txt").write_text(book[begin : begin + draw.choice([1, 35, 50, 130])])
    options = [
        *("text.rows=documents", f"text.sources.0.paths=[{tmp_path / 'books'}]"),
        *("text.validation.fraction=0.2", "training.steps=12", "training.batch_size=1"),
    ]
    train_in_processes(tiny, tmp_path / "three", *parts(3, *options))
    train(recipe_of(*ROWS, *options), tmp_path / "one")
    assert losses(tmp_path / "three") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)


@pytest.mark.slow
def test_torchrun_logs_and_samples(tiny: Path, tmp_path: Path) -> None:
    options = parts(
        2,
        *("training.minutes=0.05", "training.steps=null", "training.validate_every=100000"),
        *("training.loggers=[tensorboard]", "training.sample_tokens=20"),
    )
    torchrun = ["torch.distributed.run", "--nproc-per-node", 2, "--standalone", "-m", "lmlong", "train", tiny]
    (output,), _ = succeed([*torchrun, *options, "--out", tmp_path / "run"], [{}])
    assert output.count("validation ") == 1
    steps = logged_steps(tmp_path / "run")
    assert steps == list(range(1, len(steps) + 1)) and steps
    assert sum("sample" in line for line in metrics(tmp_path / "run")) == 1
    assert len([*(tmp_path / "run" / "tensorboard").glob("events.*")]) == 1


def test_attention_without_effect_is_refused(recipe_of: Recipes) -> None:
    plugin = Path(__file__).parents[1] / "plugins" / "two_gates.py"
    options = (f"plugins=[{plugin}]", "model.attention.kind=[linear, two_gates]", "devices=2")
    load_plugin(plugin)
    try:
        divided = recipe_of(*options, "training.sequence_parallel=2")
        with pytest.raises(UsageError, match=r"sequence_parallel: .*TwoGates has no `effect`.* Define effect"):
            prepare_new_run(divided)
    finally:
        unload_plugin(plugin)
