"""If a process of a run is lost, the others end in one line, whether it has ended or is stopped. The processes are
real, since what is tested is how they die."""

import atexit
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from lmlong.errors import UsageError
from lmlong.training.distributed import time_limit

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
    """Train, with a limit of 20 seconds."""
    program = recipe.with_name("program.py")
    program.write_text(PROGRAM.format(seconds=seconds, dies_at_once=dies_at_once))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if torchrun else []
    words = ["train", str(recipe), "--out", str(recipe.with_name("run")), "training.batch_size=2", *options]
    command = [sys.executable, *launch, str(program), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LMLONG_COLLECTIVE_SECONDS": "20", **more}
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
    assert child.returncode in (1, -signal.SIGKILL) and "Traceback" not in errors, errors
    return errors


def is_running(process: int) -> bool:
    """Whether a process has not ended, as a zombie has."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("number", "options"),
    [
        (signal.SIGKILL, ["devices=2"]),
        pytest.param(signal.SIGSTOP, ["devices=3"], marks=pytest.mark.slow),
    ],
)
def test_the_others_end_when_a_rank_is_lost(tiny: Path, number: int, options: list[str]) -> None:
    child = start(tiny, *options, seconds=1)
    processes = [asleep(tiny, rank) for rank in range(int(options[0][-1]))]
    os.kill(processes[1], number)
    errors = ended(child)  # of rank 0, or of the launcher that has killed it
    assert "another process of the run has ended or does not respond" in errors or "terminated with code -9" in errors
    until = time.monotonic() + 10
    while any(map(is_running, processes)):  # also the one that is stopped
        assert time.monotonic() < until
        time.sleep(0.1)


def test_a_limit_that_is_no_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMLONG_COLLECTIVE_SECONDS", "soon")
    with pytest.raises(UsageError, match=r"LMLONG_COLLECTIVE_SECONDS is 'soon', not a number of seconds\."):
        time_limit()
