#!/usr/bin/env python
"""Flip single bits in every kind of file that lmlong writes, and count how many are detected when the file is read.

    tools/flip_bits.py --flips 2000 [--seed 0]

Flips random bits of all kinds of files, and every bit of every header: manifests, and the headers of safetensors
files. Prints a table, and exits 1 if a flip that matters is not detected.
"""

import argparse
import io
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import NamedTuple

from lmlong.checkpoint import manifest as checkpoints
from lmlong.checkpoint import read
from lmlong.data import token_dataset as tokens
from lmlong.data.tokenizers import training as trained_tokenizer
from lmlong.errors import CheckpointError
from lmlong.inference.loading import load
from lmlong.io import folder_manifest
from lmlong.io.folder_manifest import DamagedFolder, Format
from lmlong.native.build import LIBRARY, find_compiler
from lmlong.recipe import file as recipe_file
from lmlong.training.metrics_log import MetricsLog
from lmlong.training.run import train

TEXT = "It was a dark and stormy night; the rain fell in torrents, except at occasional intervals. "

RECIPE = """
text: {{sources: [{{kind: files, paths: [{book}]}}], tokenizer: {{vocabulary: 300}}, sequence_length: 64}}
model: {{width: 16, layers: 1, heads: 2}}
training: {{steps: 3, batch_size: 2, precision: "32", log_every: 1}}
"""


class Kind(NamedTuple):
    """Files of one kind, and the check that reads them."""

    files: list[Path]
    is_whole: Callable[[], bool]
    harmless: str = ""  # why an undetected flip does no harm


def seen_by(check: Callable[[], object]) -> Callable[[], bool]:
    """Return whether a check passes. A damaged file must raise an error of lmlong."""

    def is_whole() -> bool:
        try:
            check()
            return True
        except (CheckpointError, DamagedFolder):
            return False

    return is_whole


def folder_kind(folder: Path, form: Format) -> Kind:
    return Kind(sorted(folder.iterdir()), seen_by(lambda: folder_manifest.verify(folder, form)))


def make_all(place: Path) -> dict[str, Kind]:
    """Make the files of each kind, from a run of three steps."""
    (place / "book.txt").write_text(TEXT * 200)
    (place / "recipe.yaml").write_text(RECIPE.format(book=place / "book.txt"))
    run, cache = place / "run", place / "cache"
    train(recipe_file.load(str(place / "recipe.yaml")), run)
    checkpoint, loaded = read.find(run), load(run, "cpu")
    loaded.save_state(loaded.read(TEXT), place / "book.state")

    def read_all() -> None:
        checkpoints.verify(checkpoint)
        read.read_recipe(checkpoint)

    (text,), (tokenizer,) = ((cache / name).iterdir() for name in ("tokens", "tokenizers"))
    kinds = {
        "checkpoint": Kind(sorted(checkpoint.iterdir()), seen_by(read_all)),
        "state file": Kind([place / "book.state"], seen_by(lambda: loaded.load_state(place / "book.state"))),
        "tokens": folder_kind(text, tokens.FORMAT),
        "tokenizer": folder_kind(tokenizer, trained_tokenizer.FORMAT),
        "metrics": Kind(
            [run / "metrics.jsonl"], lambda: resumes(run), "a log: invalid lines are dropped when a run is resumed"
        ),
        "notes": Kind(
            [run / "recipe.yaml", run / "environment.json", run / "tokenizer.model"],
            lambda: True,
            "copies for people: a run resumes from those in its checkpoints",
        ),
    }
    if find_compiler():
        code, *_ = sorted((cache / "native").iterdir())
        # a copy: writing to code that is loaded would take the memory from under this process
        kinds["native code"] = folder_kind(Path(shutil.copytree(code, place / "native")), LIBRARY)
    return kinds


def resumes(run: Path) -> bool:
    """Cut the metrics back as a resumed run does, which must never fail."""
    metrics_log = MetricsLog(run / "metrics.jsonl")
    whole = metrics_log.path.read_bytes()
    with redirect_stderr(io.StringIO()):
        metrics_log.cut_back(3)
    metrics_log.path.write_bytes(whole)
    return True


def header(path: Path) -> list[int]:
    """Return the positions of the bytes that describe the layout of a file."""
    data = path.read_bytes()
    if path.name == folder_manifest.NAME:
        return list(range(len(data)))
    if path.suffix in (".safetensors", ".state"):
        return list(range(8 + int.from_bytes(data[:8], "little")))
    return list(range(min(64, len(data))))


@contextmanager
def flipped(path: Path, place: int) -> Iterator[None]:
    """Flip one bit of a file in the block."""
    whole = path.read_bytes()
    byte, bit = divmod(place, 8)
    path.write_bytes(whole[:byte] + bytes([whole[byte] ^ 1 << bit]) + whole[byte + 1 :])
    try:
        yield
    finally:
        path.write_bytes(whole)


def drawn(kinds: dict[str, Kind], flips: int, draw: random.Random) -> Iterator[tuple[str, Path, int]]:
    """Yield flips at random positions, spread evenly over all kinds and files."""
    names = list(kinds)
    for number in range(flips):
        name = names[number % len(names)]
        path = draw.choice(kinds[name].files)
        yield name, path, draw.randrange(8 * path.stat().st_size)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LMLONG_CACHE"] = f"{folder}/cache"
        kinds = make_all(Path(folder))
        assert all(kind.is_whole() for kind in kinds.values())
        headers = [
            (n, p, 8 * at + bit) for n, k in kinds.items() for p in k.files for at in header(p) for bit in range(8)
        ]
        counts = {name: [0, 0, 0] for name in kinds}  # in headers, drawn, not detected
        sample = list(drawn(kinds, options.flips, random.Random(options.seed)))
        for which, flips in enumerate((headers, sample)):
            for name, path, place in flips:
                with flipped(path, place):
                    missed = kinds[name].is_whole()
                counts[name][which] += 1
                counts[name][2] += missed
                if missed and not kinds[name].harmless:
                    print(f"not detected: {path.name} of {name}, bit {place}", file=sys.stderr)
    print(f"{'files':<14}{'in headers':>12}{'drawn':>8}{'undetected':>12}")
    for name, (in_headers, at_random, unseen) in counts.items():
        why = f"  {kinds[name].harmless}" if unseen else ""
        print(f"{name:<14}{in_headers:>12,}{at_random:>8,}{unseen:>12,}{why}")
    return int(any(unseen and not kinds[name].harmless for name, (_, _, unseen) in counts.items()))


if __name__ == "__main__":
    sys.exit(main())
