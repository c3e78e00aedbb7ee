#!/usr/bin/env python
"""Draw recipes of small language models at random, and hold all ways to read a text with each against each other.

    python tools/fuzz_recipes.py --recipes 300 --seed 0

The number of a recipe, from the seed on, stands for the recipe, its weights and its text; tests/model/test_fuzz.py runs
the first ones. Prints each failure with its recipe, and at the end how near to its bound each way came. Exits 1 if any
way disagrees, a recipe is refused without a reason, or anything crashes.
"""

import argparse
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from model.agreement import Findings, fuzz
from model.recipe_draws import draw_recipe


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="number of the first recipe")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun, failed = time.perf_counter(), 0
    counts: Counter[str] = Counter()
    largest: dict[str, tuple[float, int]] = {}
    for number in range(options.seed, options.seed + options.recipes):
        drawn = draw_recipe(number)
        try:
            findings = fuzz(drawn)
        except Exception:
            findings = Findings()
            findings.complaints.append(traceback.format_exc())
        counts["refused" if findings.refused else "with native code" if findings.native else "by torch alone"] += 1
        for way, times in findings.ways.items():
            largest[way] = max(largest.get(way, (0.0, 0)), (times, number))
        if findings.complaints:
            failed += 1
            print(f"\nrecipe {number}\n\n{drawn.yaml}\n" + "\n".join(findings.complaints), flush=True)
        done = number + 1 - options.seed
        if done % 10 == 0 or done == options.recipes:
            seconds = time.perf_counter() - begun
            print(f"{done:,} recipes in {seconds:,.0f} s, {failed:,} failed", file=sys.stderr, flush=True)
    print("\n" + ", ".join(f"{count:,} {what}" for what, count in counts.items()))
    print("\nlargest error of each way as a share of what is allowed, and in which recipe")
    for way, (times, number) in sorted(largest.items()):
        print(f"{times:8.3f}  {way} ({number})")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
