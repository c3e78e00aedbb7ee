#!/usr/bin/env python
"""Draw tokenizers at random: trained on drawn texts, models of others, and damaged files.

    python tools/fuzz_tokenizers.py --tokenizers 500 --seed 0

The number of a tokenizer, from the seed on, stands for it and its texts; tests/data/test_tokenizer_fuzz.py runs the
first ones. A file is refused with a reason, or the tokenizer loses nothing: not in a text, in a stream, in pieces, nor
where a text goes on. Prints each failure, and exits 1 if there was one.
"""

import argparse
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from data.tokenizer_draws import fuzz


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizers", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="number of the first tokenizer")
    options = parser.parse_args()
    begun, failed, counts = time.perf_counter(), 0, Counter[str]()
    for number in range(options.seed, options.seed + options.tokenizers):
        try:
            what, complaints = fuzz(number)
        except Exception:
            what, complaints = "crashed", [traceback.format_exc()]
        counts[what] += 1
        if complaints:
            failed += 1
            print(f"\ntokenizer {number}, {what}\n" + "\n".join(complaints), flush=True)
    seconds = time.perf_counter() - begun
    told = ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items()))
    print(f"{options.tokenizers:,} tokenizers from {options.seed} in {seconds:,.0f} s: {told}; {failed:,} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
