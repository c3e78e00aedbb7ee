#!/usr/bin/env python
"""Draw prompts at random, valid and broken, in files, pipes and options, and give them to `lmlong generate`.

    python tools/fuzz_prompts.py --files 500 --seed 0

The number of a prompt, from the seed on, stands for it and its options; tests/inference/test_prompt_fuzz.py runs the
first ones. What is broken is refused with exit code 2 and a reason, all else is continued with exit code 0, and a saved
state is that of the printed text. Prints each failure, and exits 1 if there was one.
"""

import argparse
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from inference.prompt_draws import fuzz, make_runs

from lmlong.inference.loading import load


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="number of the first prompt")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun, failed, counts = time.perf_counter(), 0, Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = [load(run, "cpu") for run in make_runs(folder)]
        for number in range(options.seed, options.seed + options.files):
            try:
                what, complaints = fuzz(number, runs[number % len(runs)], folder)
            except Exception:
                what, complaints = "crashed", [traceback.format_exc()]
            counts[what] += 1
            if complaints:
                failed += 1
                print(f"\nprompt {number}, {what}\n" + "\n".join(complaints)[:5000], flush=True)
    seconds = time.perf_counter() - begun
    told = ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items()))
    print(f"{options.files:,} prompts from {options.seed} in {seconds:,.0f} s: {told}; {failed:,} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
