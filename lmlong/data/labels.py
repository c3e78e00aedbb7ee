"""Labels of documents, and the documents as rows, each with its label as the target of its last token."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from lmlong import recipe
from lmlong.data.batches import Arrays, TrainingBatches, evenly, in_batches, pad
from lmlong.data.document import Document
from lmlong.data.rows import IGNORED, CyclicTokens, Documents, Row, Rows
from lmlong.data.token_file import TokenFile
from lmlong.errors import UsageError, nearest
from lmlong.recipe.bounds import LABELS


class DocumentLabels:
    """The labels of the documents in each token file, in their order."""

    def __init__(self, field: str, files: Iterable[str]):
        self.field = field
        self.of_file: dict[str, list[str]] = {file: [] for file in files}

    def add(self, file: str, document: Document) -> None:
        fields = document.fields
        if self.field not in fields:
            hint = nearest(self.field, fields)
            has = f"only {', '.join(fields)}" if fields else "no other fields than its text"
            raise UsageError(f"{document.name}: no field '{self.field}', {has}. Set text.labels.field.{hint}")
        label = fields[self.field]
        if not isinstance(label, str | int):  # a bool is an int
            what = "empty" if label is None else f"a {type(label).__name__}"
            remedy = "Give it text or a whole number, or set text.labels.field."
            raise UsageError(f"{document.name}: the label in field '{self.field}' is {what}. {remedy}")
        self.of_file[file].append(str(label))


def with_label_names(text: recipe.Text, files: Iterable[TokenFile]) -> recipe.Text:
    """Return a text with the names of all labels of its documents."""
    assert text.labels is not None
    found = sorted({label for file in files for label in file.labels})
    if len(found) > LABELS:
        why = f"has {len(found):,} different values, and a model chooses from at most {LABELS:,}"
        raise UsageError(f"text.labels.field: the field '{text.labels.field}' {why}. Name another field.")
    if len(found) < 2 and not text.labels.names:
        why = f"has the value {found[0]!r} in all documents, so there is nothing to learn"
        raise UsageError(f"text.labels.field: the field '{text.labels.field}' {why}. Name another field.")
    labels = text.labels.model_copy(update={"names": text.labels.names or found})
    label_ids(found, labels.names)
    return text.model_copy(update={"labels": labels})


def label_ids(labels: Sequence[str], names: Sequence[str]) -> np.ndarray:
    """Return the index of each label among the names."""
    index = {name: number for number, name in enumerate(names)}
    if unknown := [label for label in labels if label not in index]:
        hint = nearest(unknown[0], names)
        raise UsageError(
            f"{unknown[0]!r} is a label of a document, but not one of text.labels.names: {', '.join(names)}.{hint} "
            "Name all labels, or correct the document."
        )
    return np.array([index[label] for label in labels], dtype=np.int64)


class LabelledDocuments(Documents):
    """Documents with labels, one in each row. Longer ones than a row are cut, and still end with eos."""

    def __init__(self, text: CyclicTokens, length: int, key: tuple[int, ...], group: int, labels: np.ndarray):
        super().__init__(text, length, key, group, packed=False)
        self.labels = labels

    def _pieces(self) -> tuple[np.ndarray, np.ndarray]:
        return self.text.begins, self.text.begins + np.minimum(self.text.sizes, self.length)

    def row(self, number: int, turn: int) -> Row:
        (document,) = self.packed[self._index(number)]
        return self.document(document)

    def document(self, document: int) -> Row:
        """Return the row of a document, the label as the target of its last token."""
        begin, end = self.begins[document], self.ends[document]
        row, last = self.text.piece(begin, end), end - begin - 1
        row.tokens[last] = self.text.eos
        targets = np.full_like(row.targets, IGNORED)
        targets[last] = self.labels[document]
        return row._replace(targets=targets)

    def batches(self, rows: int, is_encoder: bool, limit: int | None = None, ranks: int = 1) -> Iterator[Arrays]:
        """Yield all documents once, or an even sample of about `limit` tokens, the longest first. Batches without
        documents are added until their number is a multiple of `ranks`."""
        sizes = self.ends - self.begins
        order = np.argsort(-sizes, kind="stable")
        if limit is not None and limit < sizes.sum():
            order = order[evenly(len(order), len(order) * limit // int(sizes.sum()))]
        for numbers in in_batches(len(order), rows, ranks):
            chosen = [self.document(order[number]) for number in numbers]
            longest = max([self.text.factor, *(len(row.tokens) for row in chosen)])
            yield labelled_batch(chosen, longest, self.text.eos, is_encoder)


class LabelledBatches(TrainingBatches):
    """Training batches of documents with labels."""

    def __init__(self, sources: Sequence[Rows], weights: Sequence[float], eos: int, batch_size: int, is_encoder: bool):
        super().__init__(sources, weights, eos, batch_size)
        self.is_encoder = is_encoder

    def collate(self, rows: Sequence[Row], first: int, time: int) -> Arrays:
        return labelled_batch(rows, time, self._eos, self.is_encoder)


def labelled_batch(rows: Sequence[Row], time: int, eos: int, is_encoder: bool) -> Arrays:
    """Return rows as a batch, padded to `time`. Its mask is the document starts, or an encoder's padding."""
    masks = [np.zeros_like(row.document_starts) if is_encoder else row.document_starts for row in rows]
    padded = [(row.tokens, row.targets, mask) for row, mask in zip(rows, masks, strict=True)]
    tokens, targets, mask = pad(padded, time, (eos, IGNORED, is_encoder))
    return tokens, targets, mask
