#!/usr/bin/env python
"""Give random valid and damaged inputs to lmlong, and report those that end otherwise than documented.

    tools/fuzz.py recipes --cases 300
    tools/fuzz.py crafted-states crafted-tokens --cases 500 --seed 1000
    tools/fuzz.py all

A number stands for the same case on every machine; the tests run the first ones. Each failure is printed with its
number. Exits 1 if there is any.

To find accesses outside of tensors, compile native code with a sanitizer and preload its library:

    export LMLONG_CXXFLAGS="-fsanitize=address -g" ASAN_OPTIONS=detect_leaks=0
    LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)" tools/fuzz.py crafted-states
"""

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import crafted
from data import tokenizer_draws
from inference import crafted_states
from model import agreement, recipe_draws

SHOWN = 5000
"""Characters of a failure that are printed."""

NEAR = 0.8
"""Share of the allowed error from which a recipe that passes is printed too."""

Outcome = tuple[str, Sequence[str]]
"""What became of a case, in a word or two, and what is wrong with it."""
Try = Callable[[int], Outcome]


class Subject(NamedTuple):
    """What is drawn, and how a case of it is tried."""

    meaning: str
    prepare: Callable[[Path], Try]
    """From an empty folder to the function that tries a case."""
    cases: int


def recipes(folder: Path) -> Try:
    def try_one(number: int) -> Outcome:
        drawn = recipe_draws.draw_recipe(number)
        findings = agreement.fuzz(drawn)
        for way, error in findings.ways.items():
            if NEAR < error <= 1:
                print(f"recipe {number}, {way}: {error:.2f} of the allowed error")
        outcome = "refused" if findings.refused else "with native code" if findings.native else "by torch alone"
        return outcome, [*findings.complaints, drawn.yaml] if findings.complaints else []

    return try_one


def crafted_state_files(folder: Path) -> Try:
    cases = crafted_states.prepare(folder)
    return partial(crafted_states.try_crafted, cases=cases, file=folder / "crafted.state")


def crafted_folders(form: crafted.Format, folder: Path) -> Try:
    return partial(crafted.try_crafted, form=form, prepared=form.prepare(folder))


SUBJECTS = {
    "recipes": Subject("recipes: forward pass, decode steps and cuts agree", recipes, 300),
    "tokenizers": Subject("tokenizers and damaged tokenizer files", lambda _: tokenizer_draws.fuzz, 500),
    "crafted-states": Subject("hostile state files with correct digests", crafted_state_files, 1000),
    **{
        f"crafted-{name}": Subject(
            f"hostile {name}",
            partial(crafted_folders, form),
            10 * form.usual,
        )
        for name, form in crafted.FORMATS.items()
    },
}


def main() -> int:
    meanings = "\n".join(f"  {name:<20} {subject.meaning}" for name, subject in SUBJECTS.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nsubjects:\n{meanings}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("subjects", nargs="+", choices=["all", *SUBJECTS], metavar="SUBJECT")
    parser.add_argument("--cases", type=int, help="of each subject  [100 to 5000, by subject]")
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    options = parser.parse_args()
    torch.set_num_threads(1)
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LMLONG_CACHE"] = f"{folder}/cache"
        for name in SUBJECTS if "all" in options.subjects else options.subjects:
            place = Path(folder) / name
            place.mkdir()
            count = SUBJECTS[name].cases if options.cases is None else options.cases
            failed |= try_all(name, range(options.seed, options.seed + count), SUBJECTS[name].prepare(place))
    return int(failed)


def try_all(name: str, numbers: range, try_one: Try) -> bool:
    """Print each case that fails, and the number of cases by outcome; return whether any failed."""
    begun, failed, outcomes = time.perf_counter(), 0, Counter[str]()
    for done, number in enumerate(numbers, start=1):
        try:
            outcome, complaints = try_one(number)
        except Exception:
            outcome, complaints = "crashed", [traceback.format_exc()]
        outcomes[outcome] += 1
        if complaints:
            failed += 1
            print(f"\n{name} {number}, {outcome}\n" + "\n".join(complaints)[:SHOWN], flush=True)
        if done % 100 == 0:
            print(f"{done:,} {name}, {failed:,} failed", file=sys.stderr, flush=True)
    counts = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(outcomes.items()))
    seconds = time.perf_counter() - begun
    print(f"{len(numbers):,} {name} from {numbers.start} in {seconds:,.0f} s: {counts}; {failed:,} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
