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
import os, time
from pathlib import Path

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from lmlong.cli.main import main

passed = 0

def sleep(module, inputs):
    global passed
    passed += isinstance(module, nn.Embedding)
    if passed == 3:
        passed += 1
        Path(__file__).with_name(f"asleep-{os.environ.get('LOCAL_RANK', 0)}").write_text(str(os.getpid()))
        time.sleep(1)

register_module_forward_pre_hook(sleep)
main()
"""
"""A program that trains, and sleeps in its third forward pass."""


def start(recipe: Path, folder: Path, *options: str) -> subprocess.Popen[str]:
    """Train, with a limit of 20 seconds."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    words = [program, "train", recipe, "--out", folder / "run", "training.batch_size=2", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LMLONG_COLLECTIVE_SECONDS": "20"}
    child = subprocess.Popen(
        [sys.executable, *map(str, words)], stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    atexit.register(end, child.pid)
    return child


def end(group: int) -> None:
    """End processes that a test has left."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def asleep(child: subprocess.Popen[str], file: Path) -> int:
    """The process that writes a file, as soon as it sleeps in a step."""
    while not (file.exists() and file.read_text()):
        time.sleep(0.02)
        assert child.poll() is None, f"it has ended before {file}"
    return int(file.read_text())


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
        pytest.param(signal.SIGKILL, ["devices=2", "training.strategy=deepspeed"], marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, ["devices=2", "training.sequence_parallel=2"], marks=pytest.mark.slow),
    ],
)
def test_other_ranks_end_when_one_is_lost(tiny: Path, tmp_path: Path, number: int, options: list[str]) -> None:
    child = start(tiny, tmp_path, *options)
    processes = [asleep(child, tmp_path / f"asleep-{rank}") for rank in range(int(options[0][-1]))]
    os.kill(processes[1], number)
    errors = child.communicate(timeout=60)[1]  # of all processes that write to this pipe, until they have ended
    assert child.returncode in (1, -signal.SIGKILL) and "Traceback" not in errors, errors
    # of rank 0, or of the launcher that has killed it
    assert "another process of the run has ended or does not respond" in errors or "terminated with code -9" in errors
    while any(map(is_running, processes)):  # also the one that is stopped
        time.sleep(0.02)


def test_invalid_time_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMLONG_COLLECTIVE_SECONDS", "soon")
    with pytest.raises(UsageError, match=r"LMLONG_COLLECTIVE_SECONDS is 'soon', not a number of seconds\."):
        time_limit()
