"""The errors shown to a user: a tree of exceptions, each with the exit code of its command.

LmlongError                1  any other failure
├── UsageError             2  a recipe, an option or the data cannot be used
│   └── RecipeError        2  the mistakes of one recipe, all at once
├── DivergedError          3  a loss or gradient of training was not finite
└── CheckpointError        4  a checkpoint is missing, damaged or of another model
"""

from collections.abc import Iterable
from difflib import get_close_matches


class LmlongError(Exception):
    """A mistake a user can mend: its message names the key or file, the value and the remedy."""

    exit_code = 1


class UsageError(LmlongError):
    exit_code = 2


class RecipeError(UsageError):
    """All mistakes found in a recipe, one message each."""

    def __init__(self, mistakes: list[str]):
        super().__init__("\n".join(mistakes))
        self.mistakes = mistakes


class DivergedError(LmlongError):
    exit_code = 3


class CheckpointError(LmlongError):
    exit_code = 4


def nearest(word: object, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the known word closest to a misspelt one, or an empty string."""
    match = get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    return f" Did you mean '{match[0]}'?" if match else ""


def install_command(extra: str) -> str:
    """Return the command that installs the optional packages of an extra, and where to run it."""
    return f"pip install -e '.[{extra}]' in the folder of lmlong's source"


def other_format(name: object, found: int, known: int, again: str = "Make it again") -> str:
    """Return the remedy for a file whose format has a version that this lmlong does not read."""
    if found > known:
        return f"{name}: format {found} is of a newer lmlong, this one reads {known}. Update lmlong."
    return f"{name}: format {found} was written by an older lmlong, this one reads {known}. {again}."
