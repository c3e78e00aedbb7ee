#!/usr/bin/env python
"""How often samples of a model loop, and how much they repeat themselves beside real text.

    python tools/measure_loops.py runs/quickstart --data /usr/lib/python3.11
    python tools/measure_loops.py runs/quickstart --set loop_penalty=0 --set loop_penalty=1,temperature=0.5

Each --set is one row of sampling options, as `lmlong.load(RUN).stream` takes them, separated by commas; without any,
the defaults with the penalty on loops and without it. The columns: samples with a loop (tests/loops.py), the
share of 4-grams of tokens that are distinct within their sample, and the share of words that occur in the data. The
first row is real text: excerpts of the data, of as many tokens. With --limit N it exits with 1 where more than N
samples of the first setting loop.
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from loops import find_loop

from lmlong.errors import LmlongError
from lmlong.inference.loading import TrainedLanguageModel, load
from lmlong.inference.session import repeat_rows
from lmlong.model.sampling_options import Sampling

WORD = re.compile(r"[^\W\d_]{3,}")
ROWS = 20
"""Samples drawn at a time."""


class Repetition(NamedTuple):
    """How much some texts repeat."""

    texts: int
    loops: int
    distinct: float  # share of 4-grams, mean over the texts
    real_words: float | None  # None without data

    def row(self, name: str) -> str:
        words = "" if self.real_words is None else f"{self.real_words:.3f}"
        return f"| {name} | {self.loops} of {self.texts} | {self.distinct:.3f} | {words} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--data", type=Path, nargs="+", default=[], help="real text: files, or folders of .py and .txt")
    parser.add_argument("--set", dest="settings", action="append", metavar="NAME=VALUE,...")
    parser.add_argument("--prompt", default="")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    try:
        sys.exit(measure(options))
    except LmlongError as error:
        parser.exit(error.exit_code, f"{error}\n")


def measure(options: argparse.Namespace) -> int:
    """Print the table; return the exit code."""
    loaded = load(options.run)
    if loaded.fast_step_at_once:
        loaded.use_fast_step()
    documents = [path.read_text(encoding="utf-8", errors="ignore") for path in text_files(options.data)]
    words = {word for document in documents for word in WORD.findall(document)}
    print("| | loops | distinct 4-grams | real words |\n|---|---|---|---|")
    if documents:
        print(repetition(loaded, excerpts(loaded, documents, 400, options.tokens), words).row("real text"))
    looping = []
    for setting in options.settings or ["", "loop_penalty=0"]:
        found = repetition(loaded, samples(loaded, settings_of(setting), options), words)
        looping.append(found.loops)
        print(found.row(setting.replace(",", ", ") or "defaults"), flush=True)
    return int(options.limit is not None and looping[0] > options.limit)


def text_files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            found = (file for file in sorted(path.rglob("*")) if file.suffix in {".py", ".txt"})
            yield from (file for file in found if "site-packages" not in file.parts)
        else:
            yield path


def settings_of(text: str) -> dict[str, Any]:
    pairs = (pair.split("=", 1) for pair in text.split(",") if pair)
    return {name: json.loads(value) for name, value in pairs}


def samples(loaded: TrainedLanguageModel, setting: dict[str, Any], options: argparse.Namespace) -> list[list[int]]:
    """Return the tokens of samples of one prompt; sample n depends on the seed and n alone."""
    start, sampling = loaded.read(options.prompt), Sampling(**{"seed": options.seed} | setting)
    texts: list[list[int]] = []
    for first in range(0, options.samples, ROWS):
        numbers = [(0, number) for number in range(first, min(first + ROWS, options.samples))]
        writing = loaded.generate(repeat_rows(start, len(numbers)), sampling, numbers, options.tokens, keep=True)
        for _ in writing:
            pass
        texts += [row.tokens for row in writing.rows]
    return texts


def excerpts(loaded: TrainedLanguageModel, documents: list[str], count: int, tokens: int) -> list[list[int]]:
    """Return the tokens of places of real documents, each drawn by its length."""
    draw, found = random.Random(0), []
    for document in draw.choices(documents, weights=list(map(len, documents)), k=count):
        begin = draw.randrange(max(1, len(document) - 8 * tokens))
        found.append(loaded.tokenizer.encode(document[begin : begin + 8 * tokens])[:tokens])
    return found


def repetition(loaded: TrainedLanguageModel, texts: list[list[int]], words: set[str]) -> Repetition:
    shown = [loaded.tokenizer.decode(tokens) for tokens in texts]
    found = [word for text in shown for word in WORD.findall(text)]
    shares = []
    for tokens in texts:
        grams = list(zip(*(tokens[n:] for n in range(4)), strict=False))
        if grams:
            shares.append(len(set(grams)) / len(grams))
    return Repetition(
        len(texts),
        sum(find_loop(text) is not None for text in shown),
        sum(shares) / max(1, len(shares)),
        sum(word in words for word in found) / max(1, len(found)) if words else None,
    )


if __name__ == "__main__":
    main()
