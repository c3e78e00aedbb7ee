"""Token files of small texts, made as those of large ones are: in many batches, by several processes.

As a program: `small_batches.py RECIPE_JSON PROCESSES` makes the token files of a text section and prints their folder.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lmlong import recipe
from lmlong.data import token_encoding, token_file_writer
from lmlong.data.token_dataset import prepare
from lmlong.errors import LmlongError

ROOT = Path(__file__).parents[2]


@contextmanager
def small_batches() -> Iterator[None]:
    """Let batches and shards be small, and processes be started at once."""
    before = token_encoding.BATCH, token_encoding.ALONE, token_file_writer.BATCHES_PER_SAVE
    token_encoding.BATCH, token_encoding.ALONE, token_file_writer.BATCHES_PER_SAVE = 1 << 12, 2, 3
    try:
        yield
    finally:
        token_encoding.BATCH, token_encoding.ALONE, token_file_writer.BATCHES_PER_SAVE = before


def content(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def start_preparing(text: recipe.Text, cache: Path, processes: int = 2) -> subprocess.Popen[str]:
    """Make the token files by another program."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.data.small_batches", text.model_dump_json(), str(processes)],
        cwd=ROOT,
        env={**os.environ, "LMLONG_CACHE": str(cache)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


if __name__ == "__main__":
    with small_batches():
        try:
            text = recipe.Text.model_validate_json(sys.argv[1])
            print(prepare(text, processes=int(sys.argv[2])).folder)
        except LmlongError as error:
            sys.exit(str(error))
        except KeyboardInterrupt:
            sys.exit(130)
