#!/usr/bin/env python
"""Damage and exchange state files at random, and go on from each with the real command.

    python tools/fuzz_states.py --states 500 --seed 0

Trains two tiny models first. The number of a state, from the seed on, stands for what was done to its file;
tests/inference/test_fuzz_states.py runs the first ones. Prints each failure: a traceback, an exit code other than 2 or
4 for what is damaged, a text from it, or a message that does not name it. Exits 1 if there is any.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from inference.state_draws import prepare, try_state


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="number of the first state")
    options = parser.parse_args()
    begun, failed = time.perf_counter(), 0
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        os.environ["LMLONG_CACHE"] = f"{name}/cache"
        place = prepare(Path(name))
        for number in range(options.seed, options.seed + options.states):
            damage, complaints = try_state(number, place)
            counts[damage] += 1
            if complaints:
                failed += 1
                print(f"\nstate {number}, {damage}\n" + "\n".join(complaints), flush=True)
    print(f"{options.states:,} states in {time.perf_counter() - begun:,.0f} s, {failed:,} failed; {dict(counts)}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
