"""Processes that others start: torchrun on two machines, as this one plays them, and SLURM."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lmlong.errors import UsageError
from lmlong.recipe import Recipe
from lmlong.training.distributed import check_launch, is_main_process
from lmlong.training.run import train

from .conftest import losses

Recipes = Callable[..., Recipe]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def together(commands: list[list[str]], environments: list[dict[str, str]], fails: str = "") -> list[str]:
    """Run commands at the same time; what each said on stdout. With `fails`, each must end by a line with this text."""
    children = [
        subprocess.Popen(
            *(command,),
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command, environment in zip(commands, environments, strict=True)
    ]
    try:
        spoken = [child.communicate(timeout=120) for child in children]
    finally:
        for child in children:
            child.kill()
    if fails:
        assert all(fails in errors for _, errors in spoken) and all(child.returncode for child in children), spoken
        return []
    assert [child.returncode for child in children] == [0] * len(children), spoken
    return [output for output, _ in spoken]


def test_two_machines_under_torchrun(tiny: Path, recipe_of: Recipes, tmp_path: Path) -> None:
    port = free_port()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test"]
    options = ["nodes=2", "training.batch_size=2", "--out", str(tmp_path / "two")]
    command = [*torchrun, *meeting, "-m", "lmlong", "train", str(tiny), *options]
    outputs = together([command, command], [{}, {}])
    assert sorted(output.count("validation ") for output in outputs) == [0, 1]
    train(recipe_of("training.batch_size=4"), tmp_path / "one")
    assert [loss for _, loss in losses(tmp_path / "two")] == pytest.approx(
        [loss for _, loss in losses(tmp_path / "one")], rel=1e-4
    )


@pytest.mark.slow  # test_prepare_once.py trains in two tasks of SLURM too, without comparing losses
def test_two_tasks_under_slurm(tiny: Path, recipe_of: Recipes, tmp_path: Path) -> None:
    """srun tells each task what it is by variables, and nothing else."""
    job = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_NODEID": "0",
           "SLURM_JOB_NAME": "books", "SLURM_NODELIST": "127.0.0.1", "MASTER_PORT": str(free_port())}  # fmt: skip
    tasks = [{**job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    options = ["devices=2", "training.batch_size=2", "--out", str(tmp_path / "two")]
    outputs = together([[sys.executable, "-m", "lmlong", "train", str(tiny), *options]] * 2, tasks)
    assert [output.count("validation ") for output in outputs] == [1, 0]
    train(recipe_of("training.batch_size=4"), tmp_path / "one")
    assert [loss for _, loss in losses(tmp_path / "two")] == pytest.approx(
        [loss for _, loss in losses(tmp_path / "one")], rel=1e-4
    )


@pytest.mark.slow
def test_a_damaged_checkpoint_under_slurm(tiny: Path, tmp_path: Path) -> None:
    """Only the first task verifies digests: the second one, which has read the damaged checkpoint, may not train with
    it, and the next start resumes from the one before."""
    options = ["training.keep_last=5", "--out", str(tmp_path / "run")]
    command = [sys.executable, "-m", "lmlong", "train", str(tiny), *options]
    subprocess.run(command, check=True, capture_output=True)
    weights = tmp_path / "run" / "checkpoints" / "step-00000012" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"abcd")
    job = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_NODEID": "0",
           "SLURM_JOB_NAME": "books", "SLURM_NODELIST": "127.0.0.1"}  # fmt: skip
    two = [*command, "devices=2", "training.batch_size=2", "training.steps=14", "--resume", "auto"]
    for fails in ("have read different checkpoints", ""):
        ports = {"MASTER_PORT": str(free_port())}
        tasks = [{**job, **ports, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
        together([two] * 2, tasks, fails)
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(1, 15))


LAUNCHES = [
    (
        {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4"},
        [],
        "torchrun started 4 processes, but the recipe has nodes: 1 with d",
    ),
    ({"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "books"}, ["devices=3"], "srun started 2 processes"),
    ({"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}, ["nodes=2"], "srun started 2 processes on each machine"),
    ({}, ["nodes=2"], "2 machines do not start each other. On each of them run torchrun --nnodes 2 --nproc-per-node 1"),
    ({"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "bash"}, ["nodes=2"], "do not start each other"),
]


@pytest.mark.parametrize(("environment", "options", "message"), LAUNCHES)
def test_another_number_of_processes_is_refused(
    recipe_of: Recipes, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], options: list[str], message: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=message):
        check_launch(recipe_of(*options))


def test_in_a_shell_of_slurm_lmlong_starts_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("SLURM_JOB_NAME", "bash")
    assert not is_main_process()
    monkeypatch.setenv("SLURM_JOB_NAME", "books")
    assert is_main_process()
