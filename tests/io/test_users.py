"""Two users of one machine share a cache and a run folder; each is told what belongs to the other."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from shutil import which

import pytest
from commands import Finished

from lmlong.native.build import MORE_FLAGS

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or which("setpriv") is None, reason="only root, by setpriv, can act as two users"
)

ONE, TWO = 4001, 4002

RECIPE = """
text: {{sources: [{{kind: files, paths: [{book}]}}], tokenizer: {{kind: bytes}}, sequence_length: 64}}
model: {{width: 16, layers: 1, heads: 2}}
training: {{steps: 2, batch_size: 2, precision: "32"}}
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that all may read, with a book, a recipe, and a cache that all may write to, as /tmp is."""
    folder = Path(f"/tmp/lmlong-users-{os.getpid()}")
    folder.mkdir()
    (folder / "book.txt").write_text("words and more words " * 500)
    (folder / "recipe.yaml").write_text(RECIPE.format(book=folder / "book.txt"))
    for name, mode in (("cache", 0o1777), ("runs", 0o1777), ("one", 0o700), ("two", 0o700)):
        (folder / name).mkdir()
        (folder / name).chmod(mode)
    os.chown(folder / "one", ONE, ONE)
    os.chown(folder / "two", TWO, TWO)
    yield folder
    subprocess.run(["rm", "-r", str(folder)], check=True)


COMMANDS = """
import json, sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from lmlong.cli.main import main
for words in json.loads(sys.argv[1]):
    output, errors = StringIO(), StringIO()
    sys.argv = ["lmlong", *words]
    with redirect_stdout(output), redirect_stderr(errors):
        try:
            main()
        except SystemExit as left:
            code = left.code
    print(json.dumps([code, output.getvalue(), errors.getvalue()]))
"""


def lmlong(place: Path, user: int, *commands: Sequence[object], umask: int = 0o022) -> list[Finished]:
    """Commands as a user, in whose home nothing else is, one after the other in one process."""
    home = place / {ONE: "one", TWO: "two"}[user]
    environment = {**os.environ, "HOME": str(home), "LMLONG_CACHE": str(place / "cache"), "OMP_NUM_THREADS": "1"}
    environment[MORE_FLAGS] = "-O0"  # each user compiles native code
    # Python itself may lie where another user cannot look: reading stays allowed, writing is what a user may write
    become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    become += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    words = json.dumps([[str(word) for word in command] for command in commands])
    done = subprocess.run(
        [*become, sys.executable, "-c", COMMANDS, words],
        umask=umask, cwd=home, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [Finished(*json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_a_colleague_reads_what_one_has_trained_and_cannot_train_into_it(place: Path) -> None:
    run, train = place / "runs" / "shared", ("train", place / "recipe.yaml", "--out")
    generate, info = ("generate", run, "--max-tokens", 3), ("info", run)
    evaluate = ("eval", run, "--lengths", "16", "--min-documents", 1)
    for done in lmlong(place, ONE, (*train, run), generate):
        assert done.returncode == 0 and "others can write there" not in done.stderr, done.stderr

    reads = (generate, info, evaluate, (*train, place / "runs" / "mine"))  # the last one uses the text in the cache
    into_it = ((*train, run, "--resume", "auto", "training.steps=4"), (*train, run, "--overwrite"), (*train, run))
    (place / "other.txt").write_text("other words " * 900)
    new_text = (*train, place / "runs" / "other", f"text.sources=[{{kind: files, paths: [{place}/other.txt]}}]")
    finished = lmlong(place, TWO, *reads, *into_it, new_text)
    for done in finished[: len(reads)]:
        assert done.returncode == 0, done.stderr
    for done in finished[len(reads) : -1]:
        assert done.returncode == 2 and "Traceback" not in done.stderr and "--out" in done.stderr, done.stderr
    done = finished[-1]  # needs a cache that can be written to
    assert done.returncode == 2 and "Set LMLONG_CACHE to a folder of your own" in done.stderr, done.stderr
    # the colleague's code is compiled for the colleague
    assert (place / "two" / ".cache" / "lmlong" / "native").is_dir()


@pytest.mark.slow
def test_with_a_umask_for_a_group_both_write(place: Path) -> None:
    train = ("train", place / "recipe.yaml", "--out")
    assert lmlong(place, ONE, (*train, place / "runs" / "a"), umask=0)[0].returncode == 0
    (place / "book.txt").write_text("other words " * 900)
    (done,) = lmlong(place, TWO, (*train, place / "runs" / "b"), umask=0)
    assert done.returncode == 0, done.stderr
