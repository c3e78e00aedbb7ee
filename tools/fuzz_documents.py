#!/usr/bin/env python
"""Draw documents and archives at random: whole containers that hold hostile values.

    python tools/fuzz_documents.py --documents 5000 --seed 0

The number of a document, from the seed on, stands for it; tests/data/test_document_fuzz.py runs the first ones. A
document is refused with a reason, or its text holds each part once and is no longer than the document. Prints each
failure, and exits 1 if there was one.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from data.document_draws import fuzz
from fuzzing import numbers, try_all


def main() -> int:
    return try_all("documents", numbers(__doc__, "documents", 5000), fuzz)


if __name__ == "__main__":
    sys.exit(main())
