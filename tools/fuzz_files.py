#!/usr/bin/env python
"""Make files of every kind that lmlong reads back, hostile but under digests that are right, and use each.

    python tools/fuzz_files.py --files 2000 --seed 0
    python tools/fuzz_files.py --kind states --files 500

Each is refused with a message or used. Prints each that ends in another exception, and exits 1 if there is any. A
number and a kind stand for the same file on every machine; tests run the first ones of each kind. For accesses outside
of tensors, compile native code with a sanitizer and preload its library:

    export LMLONG_CXXFLAGS="-fsanitize=address -g" ASAN_OPTIONS=detect_leaks=0
    LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)" python tools/fuzz_files.py
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from data import crafted_tokens, document_draws
from fuzzing import try_all
from inference import crafted_states
from interop import import_draws
from surprisal import crafted_scores
from training import crafted_checkpoints

Try = Callable[[int], tuple[str, list[str]]]


def states(folder: Path) -> Try:
    cases = crafted_states.prepare(folder)
    return partial(crafted_states.try_crafted, cases=cases, file=folder / "crafted.state")


def scores(folder: Path) -> Try:
    return partial(crafted_scores.try_score, place=crafted_scores.prepare(folder))


def checkpoints(folder: Path) -> Try:
    return partial(crafted_checkpoints.try_checkpoint, place=crafted_checkpoints.prepare(folder))


def documents(folder: Path) -> Try:
    return document_draws.fuzz


def imports(folder: Path) -> Try:
    return import_draws.fuzz


def tokens(folder: Path) -> Try:
    return partial(crafted_tokens.try_tokens, place=crafted_tokens.prepare_place(folder))


KINDS: dict[str, tuple[Callable[[Path], Try], int]] = {
    "states": (states, 8),
    "scores": (scores, 3),
    "documents": (documents, 3),
    "imports": (imports, 3),
    "tokens": (tokens, 1),
    "checkpoints": (checkpoints, 2),
}
"""What makes the files of each kind, and their share of all."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first of each kind")
    parser.add_argument("--kind", choices=KINDS, action="append")
    options = parser.parse_args()
    chosen = {name: KINDS[name] for name in options.kind or KINDS}
    whole, failed = sum(share for _, share in chosen.values()), 0
    with tempfile.TemporaryDirectory() as name:
        os.environ["LMLONG_CACHE"] = f"{name}/cache"
        for kind, (prepare, share) in chosen.items():
            folder = Path(name) / kind
            folder.mkdir()
            count = -(-options.files * share // whole)
            failed |= try_all(kind, range(options.seed, options.seed + count), prepare(folder))
    return failed


if __name__ == "__main__":
    sys.exit(main())
