#!/usr/bin/env python
"""Draw pretrained models at random: whole folders and GGUF files that hold hostile values.

    python tools/fuzz_imports.py --models 2000 --seed 0

The number of a model, from the seed on, stands for it; tests/interop/test_import_fuzz.py runs the first ones. A model
is imported, or refused with an error that names its file. Prints each failure, and exits 1 if there was one.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fuzzing import numbers, try_all
from interop.import_draws import fuzz


def main() -> int:
    return try_all("models", numbers(__doc__, "models", 2000), fuzz)


if __name__ == "__main__":
    sys.exit(main())
