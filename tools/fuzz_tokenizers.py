#!/usr/bin/env python
"""Draw tokenizers at random: trained on drawn texts, models of others, and damaged files.

    python tools/fuzz_tokenizers.py --tokenizers 500 --seed 0

The number of a tokenizer, from the seed on, stands for it and its texts; tests/data/test_tokenizer_fuzz.py runs the
first ones. A file is refused with a reason, or the tokenizer loses nothing: not in a text, in a stream, in pieces, nor
where a text goes on. Prints each failure, and exits 1 if there was one.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from data.tokenizer_draws import fuzz
from fuzzing import numbers, try_all


def main() -> int:
    return try_all("tokenizers", numbers(__doc__, "tokenizers", 500), fuzz)


if __name__ == "__main__":
    sys.exit(main())
