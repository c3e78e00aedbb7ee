"""The libraries of native code in the package."""

from types import ModuleType

from lmlong.attention.delta import native as delta
from lmlong.attention.linear import native as linear
from lmlong.attention.ngram.native import kernel as ngram
from lmlong.decode import native
from lmlong.model.learning.native import kernel as learning
from lmlong.native.grouped import kernel as grouped
from lmlong.native.rows import kernel as rows

LIBRARIES: dict[str, ModuleType] = {
    "linear attention": linear,
    "delta rule": delta,
    "n-gram attention": ngram,
    "decode step": native,
    "quantized products": grouped,
    "learning while reading": learning,
    "norms, gates and losses": rows,
}
"""The modules of all libraries, by what these compute. `code` returns the sources of one, `library` loads it."""


def describe_libraries() -> str | None:
    """Load all libraries. Return how they were made, in words, and which could not be loaded; None if none could."""
    loaded = {name: module.library() for name, module in LIBRARIES.items()}
    made = dict.fromkeys(library.origin for library in loaded.values() if library)
    missing = [name for name, library in loaded.items() if library is None]
    return " and ".join(made) + (f"; not loaded: {', '.join(missing)}" if missing else "") if made else None
