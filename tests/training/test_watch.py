"""If a process of a run is lost, the others end and name it, whether it has ended or is stopped; a slow step ends
nothing. The processes are real, since what is tested is how they die."""

import atexit
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from lightning.pytorch import Trainer

from lmlong.errors import UsageError
from lmlong.training.watch import Watch

from .conftest import logged_steps
from .test_launchers import free_port

PROGRAM = """
import os, signal, sys, time
from pathlib import Path

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from lmlong.cli.main import main

folder, rank, passed = Path(__file__).parent, int(os.environ.get("SLURM_PROCID", os.environ.get("LOCAL_RANK", 0))), 0

def sleep(module, inputs):
    global passed
    passed += isinstance(module, nn.Embedding)
    if passed == 3:
        passed += 1
        (folder / f"asleep-{{rank}}").write_text(str(os.getpid()))
        time.sleep({seconds})

if {dies_at_once} and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
register_module_forward_pre_hook(sleep)
main()
"""
"""A program that trains, and sleeps in its third forward pass."""


def start(
    recipe: Path, *options: str, seconds: int = 3600, dies_at_once: bool = False, torchrun: bool = False, **more: str
) -> subprocess.Popen[str]:
    """Train, with a limit of three seconds."""
    program = recipe.with_name("program.py")
    program.write_text(PROGRAM.format(seconds=seconds, dies_at_once=dies_at_once))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if torchrun else []
    words = ["train", str(recipe), "--out", str(recipe.with_name("run")), "training.batch_size=2", *options]
    command = [sys.executable, *launch, str(program), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LMLONG_LOST_AFTER": "3", **more}
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    atexit.register(end, child.pid)
    return child


def end(group: int) -> None:
    """End processes that a test has left."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def asleep(recipe: Path, rank: int) -> int:
    """The process of a rank, as soon as it sleeps in a step."""
    file, until = recipe.with_name(f"asleep-{rank}"), time.monotonic() + 180
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < until, f"rank {rank} has not come to its third step"
        time.sleep(0.02)
    return int(file.read_text())


def ended(child: subprocess.Popen[str]) -> str:
    """What a process that fails has written, as soon as it and all processes that write to the same pipe have ended."""
    errors = child.communicate(timeout=60)[1]
    assert child.returncode == 1 and "Traceback" not in errors, errors
    return errors


STOPPED = "has not responded for 3 seconds: its process is stopped, or its machine is down or unreachable. The others "
KILLED = "was killed by SIGKILL, as the system does when memory is short. The others have ended too: resume from the la"


@pytest.mark.parametrize(
    ("number", "options", "what"),
    [
        (signal.SIGSTOP, ["devices=2"], STOPPED),
        pytest.param(signal.SIGSTOP, ["devices=3", "training.strategy=deepspeed"], STOPPED, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, ["devices=3"], KILLED, marks=pytest.mark.slow),
    ],
    ids=["stopped", "stopped, three", "killed, three"],
)
def test_a_rank_that_is_lost_in_a_step_is_named(tiny: Path, number: int, options: list[str], what: str) -> None:
    """All ranks are in a step of an hour, so none of them learns of it from a connection."""
    child = start(tiny, *options)
    ranks = int(options[0][-1])
    processes = [asleep(tiny, rank) for rank in range(ranks)]
    os.kill(processes[1], number)
    # rank 0 ends the ranks that it has started, which may have said it too by then
    assert 1 <= ended(child).count(f"error: rank 1 of {ranks} {what}") < ranks


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "number"), [(0, signal.SIGSTOP), (1, signal.SIGKILL)])
def test_tasks_of_slurm_name_the_lost_one(tiny: Path, lost: int, number: int) -> None:
    """They did not start each other, and the first one holds the store by which they know."""
    job = {"SLURM_NTASKS": "3", "SLURM_NTASKS_PER_NODE": "3", "SLURM_NNODES": "1", "SLURM_NODEID": "0",
           "SLURM_JOB_NAME": "books", "SLURM_NODELIST": "127.0.0.1", "MASTER_PORT": str(free_port())}  # fmt: skip
    ranks = [job | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(3)]
    seconds = 3600 if number == signal.SIGSTOP else 3
    tasks = [start(tiny, "devices=3", "training.steps=100000", seconds=seconds, **task) for task in ranks]
    for rank in range(3):
        asleep(tiny, rank)
    os.kill(tasks[lost].pid, number)
    for rank in {0, 1, 2} - {lost}:
        assert f"error: rank {lost} of 3 {STOPPED}" in ended(tasks[rank])
    tasks[lost].kill()
    tasks[lost].communicate()


@pytest.mark.slow
def test_processes_of_torchrun_name_the_lost_one(tiny: Path) -> None:
    child = start(tiny, "devices=2", torchrun=True)
    processes = [asleep(tiny, rank) for rank in range(2)]
    os.kill(processes[1], signal.SIGSTOP)
    errors = child.communicate(timeout=60)[1]
    assert child.returncode == 1 and f"error: rank 1 of 2 {STOPPED}" in errors


@pytest.mark.slow
def test_a_rank_that_is_killed_before_it_has_met_the_others_is_named(tiny: Path) -> None:
    assert f"error: rank 1 of 2 {KILLED}" in ended(start(tiny, "devices=2", dies_at_once=True))


@pytest.mark.slow
def test_a_slow_step_ends_nothing(tiny: Path) -> None:
    """Nor does one of the ranks, when they are all stopped for a while, as by Ctrl-Z."""
    child = start(tiny, "devices=2", "training.steps=6", seconds=8)
    for rank in range(2):
        asleep(tiny, rank)
    os.killpg(child.pid, signal.SIGSTOP)
    time.sleep(4)
    os.killpg(child.pid, signal.SIGCONT)
    assert child.communicate(timeout=60) and child.returncode == 0
    assert logged_steps(tiny.with_name("run")) == list(range(1, 7))


def test_a_limit_that_is_no_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMLONG_LOST_AFTER", "soon")
    with pytest.raises(UsageError, match=r"LMLONG_LOST_AFTER is 'soon', not a number of seconds\. Give one, or inf\."):
        Watch(Trainer(logger=False), processes=2)
