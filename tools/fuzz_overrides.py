#!/usr/bin/env python
"""Draw recipe files and overrides at random, valid and broken, and give each to the real command.

    python tools/fuzz_overrides.py --recipes 2000 --seed 0

The number of a recipe, from the seed on, stands for its file, its overrides and the command; tests/cli/test_fuzz.py
runs the first ones. Prints each failure: a traceback, an exit code that is not documented, or a message that names
neither key nor file. Exits 1 if there is any.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from cli.override_draws import draw, run

DRY_RUNS = 100
"""One in so many recipes that are sound gets a real dry run, which takes seconds."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first recipe")
    options = parser.parse_args()
    begun, failed = time.perf_counter(), 0
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["LMLONG_CACHE"] = str(folder / "cache")
        (folder / "book.txt").write_text("once upon a time there was a book. " * 60)
        for number in range(options.seed, options.seed + options.recipes):
            drawn = draw(number, folder / "book.txt")
            found = run(drawn, folder, dry_run=number % DRY_RUNS == 0)
            counts[f"exit code {found.code}"] += 1
            if found.complaints:
                failed += 1
                print(f"\nrecipe {number}: {' '.join(drawn.words)} {drawn.overrides}\n{drawn.recipe!r}\n{found.told}")
                print("\n".join(found.complaints), flush=True)
    print(f"{options.recipes:,} recipes in {time.perf_counter() - begun:,.0f} s, {failed:,} failed; {dict(counts)}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
