#!/usr/bin/env python
"""Draw recipe files and overrides at random, valid and broken, and give each to the real command.

    python tools/fuzz_overrides.py --recipes 2000 --seed 0

The number of a recipe, from the seed on, stands for its file, its overrides and the command; tests/cli/test_fuzz.py
runs the first ones. Prints each failure: a traceback, an exit code that is not documented, or a message that names
neither key nor file. Exits 1 if there is any.
"""

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from cli.override_draws import draw, run
from fuzzing import numbers, try_all

DRY_RUNS = 100
"""One in so many recipes that are sound gets a real dry run, which takes seconds."""


def main() -> int:
    recipes = numbers(__doc__, "recipes", 2000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["LMLONG_CACHE"] = str(folder / "cache")
        (folder / "book.txt").write_text("once upon a time there was a book. " * 60)
        return try_all("recipes", recipes, lambda number: try_one(number, folder))


def try_one(number: int, folder: Path) -> tuple[str, list[str]]:
    drawn = draw(number, folder / "book.txt")
    found = run(drawn, folder, dry_run=number % DRY_RUNS == 0)
    case = f"{' '.join(drawn.words)} {drawn.overrides}\n{drawn.recipe!r}\n{found.told}"
    return f"exit code {found.code}", [*found.complaints, case] if found.complaints else []


if __name__ == "__main__":
    sys.exit(main())
