#!/usr/bin/env python
"""Draw prompts at random, valid and broken, in files, pipes and options, and give them to `lmlong generate`.

    python tools/fuzz_prompts.py --prompts 500 --seed 0

The number of a prompt, from the seed on, stands for it and its options; tests/inference/test_prompt_fuzz.py runs the
first ones. What is broken is refused with exit code 2 and a reason, all else is continued with exit code 0, and a saved
state is that of the printed text. Prints each failure, and exits 1 if there was one.
"""

import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fuzzing import numbers, try_all
from inference.prompt_draws import fuzz, make_runs

from lmlong.inference.loading import load


def main() -> int:
    prompts = numbers(__doc__, "prompts", 500)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = [load(run, "cpu") for run in make_runs(folder)]
        return try_all("prompts", prompts, lambda number: fuzz(number, runs[number % len(runs)], folder))


if __name__ == "__main__":
    sys.exit(main())
