"""The share of the held-out text that occurs in the training text, which a model may have memorized."""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

from lmlong.data.token_file import TokenFile
from lmlong.data.tokenizers.base import Tokenizer
from lmlong.data.windows import WINDOW, Windows

PIECE = 1 << 15
"""Tokens that are decoded at once."""

NOTED = 0.05
"""Share of the windows from which training begins with a note."""


def overlap(train: Iterable[TokenFile], held_out: TokenFile, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the number of windows of the held-out text, sampled if it is large, and how many of these occur in the
    training text."""
    windows = Windows()
    windows.add((0, text) for text in _documents(held_out, tokenizer))
    windows.find(text for file in train for text in _documents(file, tokenizer))
    (kept,), (shared,) = windows.counts(1)
    share = shared / max(kept, 1)
    return {"window_bytes": WINDOW, "windows": int(kept), "in_training_text": int(shared), "share": share}


def overlap_note(found: dict[str, Any]) -> str:
    """Return the overlap as a sentence."""
    windows = f"{found['window_bytes']}-byte windows"
    return f"{found['share']:.1%} of the {windows} of the held-out text occur in the training text"


def _documents(file: TokenFile, tokenizer: Tokenizer) -> Iterator[Iterator[bytes]]:
    bounds = [*file.starts.tolist(), len(file.tokens)]
    for begin, end in pairwise(bounds):
        yield (
            tokenizer.decode_bytes(file.tokens[at : min(at + PIECE, end)].tolist()) for at in range(begin, end, PIECE)
        )
