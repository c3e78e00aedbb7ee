"""What all tests share: one thread each, for tiny tensors gain nothing from two, and no files outside their folders."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

import pytest
import torch

from lmlong.report import progress

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "tools"))
torch.set_num_threads(1)
progress.FIRST = 1e6  # what is printed must not depend on how long it takes
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start, and for those who set threads by it

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, which torch does at its own time

# What is ignored here, as in the background or under nohup, would be ignored by each program that tests start, too;
# a handler that does nothing is not handed on.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda *_: None)

BEGUN = time.time()

SLOWEST = (
    *("training/test_deepspeed.py", "interop/test_page_in_browser.py", "training/test_resume_exactly.py"),
    *("training/test_several_processes.py", "training/test_conversion.py", "training/test_history.py"),
    *("decode/test_native.py", "tools/test_gpu_ready.py", "training/test_lost_process.py", "test_memory.py"),
    *("test_public.py", "training/test_from_python.py", "training/test_teacher.py", "training/test_run.py"),
    *("interop/test_export.py", "data/test_token_encoding.py", "cli/test_train.py", "training/test_masked.py"),
    *("model/test_fuzz.py", "attention/test_laws.py", "evaluation/test_law_check.py"),
)
"""The files that take longest, the longest first: see the durations of `pytest --durations=0`."""

NOBODY = 65534


@pytest.fixture
def users_folder() -> Iterator[Path]:
    """A folder of an ordinary user, which the test is while it runs: root may read and write everywhere."""
    user = os.geteuid()
    with TemporaryDirectory() as folder:
        if user == 0:
            os.chown(folder, NOBODY, -1)
            os.seteuid(NOBODY)
        yield Path(folder)
        os.seteuid(user)


ROOT = Path(__file__).parents[1]


def visible_files() -> set[str]:
    """Return the names in the repository root, without hidden ones: those of caches and tools."""
    return {name for name in os.listdir(ROOT) if not name.startswith(".") and name != "__pycache__"}


KNOWN = visible_files()


@pytest.fixture(autouse=True)
def clean_root() -> Iterator[None]:
    """Let a test fail after which the repository root has a new file: tests write below `tmp_path`."""
    yield
    gained = visible_files() - KNOWN
    KNOWN.update(gained)  # the other tests did not write it
    assert not gained, f"written to {ROOT}, where no test may write: {', '.join(sorted(gained))}"


LONGEST, LONGEST_OF_SLOW = 300, 1800
"""Seconds that a test may take."""


@contextmanager
def limited(item: pytest.Item) -> Iterator[None]:
    """Let a test that waits for ever fail, and say where it waits."""

    def end(number: int, frame: FrameType | None) -> None:
        pytest.fail(f"it takes more than {seconds} s")

    seconds = LONGEST_OF_SLOW if item.get_closest_marker("slow") else LONGEST
    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with limited(item):
        return (yield)


pytest_runtest_call = pytest_runtest_teardown = pytest_runtest_setup


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest, so that no worker is left alone with one of them at the end."""
    rank = {ROOT / "tests" / name: number for number, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Note how long a whole run took, and of how many tests, for tools/baseline."""
    config = session.config
    everything = [str(config.rootpath / "tests")]
    whole = config.args in (everything, config.getini("testpaths"))
    whole = whole and not config.option.keyword and not config.option.collectonly
    if hasattr(config, "workerinput") or not whole or session.testsfailed:
        return
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    passed = len(reporter.stats.get("passed", [])) if reporter else 0
    config.cache.set("lmlong/suite", {"seconds": round(time.time() - BEGUN, 1), "tests": passed})
