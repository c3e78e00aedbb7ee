#!/usr/bin/env python
"""Draw recipes of small language models at random, and hold all ways to read a text with each against each other.

    python tools/fuzz_recipes.py --recipes 300 --seed 0

The number of a recipe, from the seed on, stands for the recipe, its weights and its text; tests/model/test_fuzz.py runs
the first ones. Prints each failure with its recipe, and at the end how near to its bound each way came. Exits 1 if any
way disagrees, a recipe is refused without a reason, or anything crashes.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fuzzing import numbers, try_all
from model.agreement import fuzz
from model.recipe_draws import draw_recipe


def main() -> int:
    recipes = numbers(__doc__, "recipes", 300)
    torch.set_num_threads(1)
    largest: dict[str, tuple[float, int]] = {}

    def try_one(number: int) -> tuple[str, list[str]]:
        drawn = draw_recipe(number)
        findings = fuzz(drawn)
        for way, times in findings.ways.items():
            largest[way] = max(largest.get(way, (0.0, 0)), (times, number))
        what = "refused" if findings.refused else "with native code" if findings.native else "by torch alone"
        return what, [*findings.complaints, drawn.yaml] if findings.complaints else []

    code = try_all("recipes", recipes, try_one)
    print("\nlargest error of each way as a share of what is allowed, and in which recipe")
    for way, (times, number) in sorted(largest.items()):
        print(f"{times:8.3f}  {way} ({number})")
    return code


if __name__ == "__main__":
    sys.exit(main())
