"""The command line in the process of the tests, which spares each call the seconds in which a process imports torch."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest

from lmlong.cli import main as cli


class Finished(NamedTuple):
    """A finished command, as `subprocess.run` returns it."""

    returncode: int
    stdout: str
    stderr: str


def lmlong(*words: object, cwd: Path | None = None) -> Finished:
    """Run a command in this process, in the current folder or another."""
    output, errors = (io.TextIOWrapper(io.BytesIO(), "utf-8", newline="") for _ in range(2))
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(errors):
        patch.setattr(sys, "argv", ["lmlong", *map(str, words)])
        if cwd is not None:
            patch.chdir(cwd)
        with pytest.raises(SystemExit) as left:
            cli.main()
    told = []
    for stream in (output, errors):
        stream.flush()
        stream.seek(0)
        told.append(stream.read())
    assert isinstance(left.value.code, int)
    return Finished(left.value.code, *told)
