"""Clusters of documents that are alike, as those of one author are: each counts as one for the errors.

A field is a document's own: that of its record, or for a file `file` and `folder`, its name and the folder's. `author`,
where no record has it, is the name of the file up to its first "-", as in burroughs-tarzan-of-the-apes.txt.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lmlong.errors import UsageError, nearest

AUTHOR = "author"


class Clusters(NamedTuple):
    """The clusters of the documents of a text."""

    field: str
    number: np.ndarray  # (documents,) of each one's cluster


def clusters_by(field: str, documents: Sequence[Mapping[str, Any]]) -> Clusters:
    """Return clusters of documents of which a field is the same; one whose field is empty is a cluster of its own."""
    values = [_value(field, fields) for fields in documents]
    keys = [place if value is None else repr(value) for place, value in enumerate(values)]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return Clusters(field, np.array([numbers[key] for key in keys], dtype=np.int64))


def _value(field: str, fields: Mapping[str, Any]) -> Any:
    if field in fields:
        return fields[field]
    if field == AUTHOR and "file" in fields:
        return fields["file"].split("-")[0].split(".")[0]
    known = [*fields, *([AUTHOR] if "file" in fields else [])]
    there = f"only {', '.join(known)}" if known else "and none at all"
    raise UsageError(f"--cluster-by: a document has no field {field!r}, {there}.{nearest(field, known)}")
