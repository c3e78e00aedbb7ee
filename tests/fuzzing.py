"""What the fuzzers of tools/ share: options, a case for each number, and what came of them all."""

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence

SHOWN = 5000
"""Characters of the complaints of a case."""


def numbers(doc: str | None, cases: str, count: int) -> range:
    """Return the numbers of the cases that the command line asks for."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(f"--{cases}", type=int, default=count, dest="count")
    parser.add_argument("--seed", type=int, default=0, help="number of the first")
    options = parser.parse_args()
    return range(options.seed, options.seed + options.count)


def try_all(cases: str, numbers: range, try_one: Callable[[int], tuple[str, Sequence[str]]]) -> int:
    """Print what fails, and how many came out as what; return the exit code. `try_one` returns what a case is or came
    to, in a word or two, and complaints; its crash is a complaint too."""
    begun, failed, counts = time.perf_counter(), 0, Counter[str]()
    for done, number in enumerate(numbers, start=1):
        try:
            what, complaints = try_one(number)
        except Exception:
            what, complaints = "crashed", [traceback.format_exc()]
        counts[what] += 1
        if complaints:
            failed += 1
            print(f"\nnumber {number}, {what}\n" + "\n".join(complaints)[:SHOWN], flush=True)
        if done % 100 == 0:
            print(f"{done:,} {cases}, {failed:,} failed", file=sys.stderr, flush=True)
    told = ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items()))
    seconds = time.perf_counter() - begun
    print(f"{len(numbers):,} {cases} from {numbers.start} in {seconds:,.0f} s: {told}; {failed:,} failed")
    return int(failed > 0)
