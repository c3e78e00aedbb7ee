"""Release notes: the newest section of the changelog."""

import re

import lmlong
from lmlong.errors import LmlongError


def release_notes(changelog: str) -> str:
    """Return the text of the newest section. Raise LmlongError unless it is of this version."""
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)
    title, _, text = sections[1].partition("\n")
    if title.split()[0] != lmlong.__version__:
        raise LmlongError(f"CHANGELOG.md begins with {title}, and the version is {lmlong.__version__}.")
    return text.strip() + "\n"
