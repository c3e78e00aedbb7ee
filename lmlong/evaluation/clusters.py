"""Clusters of similar documents, such as those of one author: each counts as one for the errors.

A document has the fields of its record, or for a file `file` and `folder`, its name and the folder's. `author`, if no
record has it, is the name of the file up to its first "-", as in burroughs-tarzan-of-the-apes.txt.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lmlong.errors import UsageError, nearest

AUTHOR = "author"


class Clusters(NamedTuple):
    """The clusters of the documents of a text."""

    field: str
    number: np.ndarray  # (documents,) of the cluster of each


def clusters_by(field: str, documents: Sequence[Mapping[str, Any]]) -> Clusters:
    """Return the clusters of documents with the same value of a field; one without a value is its own cluster."""
    values = [_value(field, fields) for fields in documents]
    keys = [index if value is None else repr(value) for index, value in enumerate(values)]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return Clusters(field, np.array([numbers[key] for key in keys], dtype=np.int64))


def _value(field: str, fields: Mapping[str, Any]) -> Any:
    if field in fields:
        return fields[field]
    if field == AUTHOR and "file" in fields:
        return fields["file"].split("-")[0].split(".")[0]
    names = [*fields, *([AUTHOR] if "file" in fields else [])]
    listed = f"only {', '.join(names)}" if names else "and no other field"
    raise UsageError(f"--cluster-by: a document has no field {field!r}, {listed}.{nearest(field, names)}")
