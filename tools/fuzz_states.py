#!/usr/bin/env python
"""Damage and exchange state files at random, and go on from each with the real command.

    python tools/fuzz_states.py --states 500 --seed 0

Trains two tiny models first. The number of a state, from the seed on, stands for what was done to its file;
tests/inference/test_fuzz_states.py runs the first ones. Prints each failure: a traceback, an exit code other than 2 or
4 for what is damaged, a text from it, or a message that does not name it. Exits 1 if there is any.
"""

import os
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fuzzing import numbers, try_all
from inference.state_draws import prepare, try_state


def main() -> int:
    states = numbers(__doc__, "states", 500)
    with tempfile.TemporaryDirectory() as name:
        os.environ["LMLONG_CACHE"] = f"{name}/cache"
        return try_all("states", states, partial(try_state, place=prepare(Path(name))))


if __name__ == "__main__":
    sys.exit(main())
