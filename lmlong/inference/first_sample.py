"""A short text of a model that has just been trained."""

import time
from itertools import takewhile
from pathlib import Path

from lmlong.checkpoint import manifest
from lmlong.checkpoint.location import find
from lmlong.errors import LmlongError
from lmlong.inference.loading import load

TOKENS, SECONDS = 80, 1.0
"""The text ends after so many tokens, or so long."""

LARGEST = 1 << 30
"""Weights of more bytes take too long to load for it."""


def first_sample(run: Path) -> str:
    """Return what the model of a run writes from the beginning of a document, with the default sampling options; ""
    where that would take long or cannot be done. It is computed on the CPU, whose memory training does not need."""
    try:
        if (find(run) / manifest.WEIGHTS).stat().st_size > LARGEST:
            return ""
        model = load(run, "cpu")
        end = time.monotonic() + SECONDS
        return "".join(takewhile(lambda _: time.monotonic() < end, model.stream(max_tokens=TOKENS)))
    except (LmlongError, OSError):
        return ""
