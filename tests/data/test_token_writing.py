"""If the disk is full while token files are written, the error reports the missing size, and the work can resume."""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lmlong import recipe
from lmlong.data.token_dataset import prepare
from lmlong.errors import LmlongError

from .conftest import sentences
from .small_batches import content, small_batches


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 120 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=120k", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_full_disk_reports_the_missing_size_and_the_work_resumes(
    text_of: Callable[..., recipe.Text], small_disk: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    text = text_of(sentences(60, lines=30))
    whole = content(prepare(text).folder)
    size = sum(len(data) for name, data in whole.items() if name.endswith((".tokens", ".starts")))
    monkeypatch.setenv("LMLONG_CACHE", str(small_disk))
    with small_batches(), pytest.raises(LmlongError) as error:
        prepare(text, processes=processes)
    sizes = re.search(
        r"No space left on device. (.*) MB of tokens are written; the rest needs about (.*) MB", str(error.value)
    )
    assert sizes and str(small_disk) in str(error.value)
    written, needed = (float(number) * 1e6 for number in sizes.groups())
    assert written < 120e3 and abs(written + needed - size) < size / 3
    subprocess.run(["mount", "-o", "remount,size=4m", small_disk], check=True)
    with small_batches():
        assert content(prepare(text, processes=processes).folder) == whole
