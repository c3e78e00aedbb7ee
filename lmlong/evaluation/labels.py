"""Accuracy of a model of labels on documents: of all, by length, and by label."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lmlong.data.labels import label_ids
from lmlong.data.token_dataset import prepare
from lmlong.data.token_file import TokenFile
from lmlong.evaluation.document_sums import Estimate
from lmlong.evaluation.perplexity import text_options
from lmlong.inference.classify import TrainedClassifier
from lmlong.model.base import count_parameters
from lmlong.model.device import Precision, autocast
from lmlong.model.metrics import LossTotals
from lmlong.report.json_values import json_keys, json_values
from lmlong.report.progress import each
from lmlong.report.report import Report, Table
from lmlong.report.table import Column, format_range, plural, with_error

AT_ONCE = 256
"""Documents that are sorted by length and read in batches together."""

SHORTEST = 64
"""Upper bound of the first class of lengths; each further one is twice as long."""

MOST_CONFUSIONS = 10
"""The most pairs of labels that are printed; JSON holds all."""


@json_keys("from_tokens", "to_tokens", "documents", "accuracy=accuracy.value", "accuracy_error=accuracy.error")
class Predictions(NamedTuple):
    """The labels of some documents, and those that a model predicts, as indices of its labels."""

    labels: np.ndarray  # (documents,)
    predicted: np.ndarray  # (documents,)
    nats: np.ndarray  # (documents,) -log p of the label
    tokens: np.ndarray  # (documents,) of each document

    @property
    def documents(self) -> int:
        return len(self.labels)

    @property
    def totals(self) -> LossTotals:
        return LossTotals(math.fsum(self.nats), self.documents, correct=int((self.labels == self.predicted).sum()))

    @property
    def accuracy(self) -> Estimate:
        return Estimate(self.totals.accuracy, self.totals.accuracy_error)

    @property
    def from_tokens(self) -> int:
        return int(self.tokens.min())

    @property
    def to_tokens(self) -> int:
        return int(self.tokens.max())

    def by_length(self) -> list["Predictions"]:
        """Return those of documents of up to SHORTEST tokens, of up to twice as many, and so on."""
        classes = np.ceil(np.log2(np.maximum(self.tokens, SHORTEST) / SHORTEST))
        return [Predictions(*(part[classes == number] for part in self)) for number in np.unique(classes)]


@json_keys(
    *("name", "checkpoint", "parameters", "trained_length", "precision", "documents=all.documents"),
    *("correct=all.totals.correct", "accuracy=all.accuracy.value", "accuracy_error=all.accuracy.error"),
    *("nats_per_document=all.totals.nats_per_token", "majority", "cut", "labels", "confusion", "by_length"),
)
class LabelReport(NamedTuple):
    """The predictions of one model."""

    name: str
    checkpoint: str
    parameters: int
    trained_length: int
    precision: Precision
    labels: list[str]
    all: Predictions
    majority: float | None  # accuracy of the most frequent label of the training text; None for other text
    cut: int  # documents of which an encoder read only the beginning

    @property
    def by_length(self) -> list[Predictions]:
        return self.all.by_length()

    @property
    def confusion(self) -> dict[str, dict[str, int]]:
        """The number of documents of each label, by the label that the model predicts."""
        counts = Counter(zip(self.all.labels.tolist(), self.all.predicted.tolist(), strict=True))
        columns = list(enumerate(self.labels))
        return {label: {name: counts[row, column] for column, name in columns} for row, label in columns}


def measure_labels(
    name: str,
    trained: TrainedClassifier,
    files: Sequence[str | Path] = (),
    tokens: int | None = None,
    precision: Precision | None = None,
) -> LabelReport:
    """Return the predictions for the whole documents in the first `tokens` of the held-out text, or of `files`, whose
    labels are in the field that the recipe names; by default in the number format of training."""
    dataset, chosen = prepare(text_options(trained, files), trained.tokenizer), trained.set_up_evaluation(precision)
    documents = _documents(dataset.validation, tokens)
    labels = label_ids(dataset.validation.labels[: len(documents)], trained.labels)
    parts = [documents[begin : begin + AT_ONCE] for begin in range(0, len(documents), AT_ONCE)]
    with autocast(trained.device, chosen):
        found = [one for part in each(parts, name, len(parts), "batches") for one in trained.classify_tokens(part)]
    probabilities = np.array([[*one.probabilities.values()] for one in found])
    nats = -np.log(probabilities[np.arange(len(labels)), labels].clip(min=1e-300))
    counts = Counter(label for file in dataset.train for label in file.labels)
    common = trained.labels.index(counts.most_common(1)[0][0])
    return LabelReport(
        name,
        str(trained.checkpoint),
        count_parameters(trained.model),
        trained.recipe.text.sequence_length,
        chosen,
        trained.labels,
        Predictions(labels, probabilities.argmax(1), nats, np.array([one.tokens for one in found])),
        None if files else float((labels == common).mean()),
        sum(one.read < one.tokens for one in found),
    )


def _documents(text: TokenFile, limit: int | None) -> list[list[int]]:
    """Return the whole documents within the first `limit` tokens, at least one."""
    ends = np.append(text.starts[1:], len(text.tokens))
    count = len(ends) if limit is None else max(1, int((ends <= limit).sum()))
    parts = np.split(np.asarray(text.tokens[: ends[count - 1]]), text.starts[1:count])
    return [document.tolist() for document in parts]


COLUMNS = [
    *with_error(Column("accuracy", 10, ".3f", value="all.accuracy")),
    Column("majority", 10, ".3f", value="majority"),
    Column("nats", 8, ".3f", value="all.totals.nats_per_token"),
    Column("documents", 11, ",", value="all.documents"),
    Column("  run", 0, align="<", value=lambda report: f"  {report.name}"),
]
BY_LENGTH = [
    Column("tokens", 18, value=lambda part: format_range(part.from_tokens, part.to_tokens)),
    Column("documents", 11, ",", value="documents"),
    *with_error(Column("accuracy", 10, ".3f", value="accuracy")),
]
CONFUSION = [Column("label", 18), Column("predicted", 18), Column("documents", 11, ","), Column("of", 8, ",")]


def label_report(reports: Sequence[LabelReport]) -> Report:
    """Return a line for each run, and for each run its accuracy by length and the labels that it takes for others."""
    precisions = ", ".join(dict.fromkeys(report.precision for report in reports))
    parts: list[str | Table] = [Table(f"labels of documents, precision {precisions}", COLUMNS, reports)]
    for report in reports:
        parts.append(Table(f"{report.name}: by length", BY_LENGTH, report.by_length))
        parts.append(Table(f"{report.name}: wrong labels, the most frequent first", CONFUSION, _wrong(report)))
        if report.cut:
            cut = f"{report.cut:,} of {plural(report.all.documents, 'document')}"
            parts.append(f"{report.name}: {cut} cut to {report.trained_length:,} tokens, the longest in training")
    return Report(parts, {"runs": [{"objective": "label", **json_values(report)} for report in reports]})


def _wrong(report: LabelReport) -> list[tuple[str, str, int, int]]:
    """Return the most frequent pairs of a label and another one that is predicted, with their number of documents and
    that of the label."""
    counted = [
        (label, predicted, count, sum(row.values()))
        for label, row in report.confusion.items()
        for predicted, count in row.items()
        if count and label != predicted
    ]
    return sorted(counted, key=lambda pair: -pair[2])[:MOST_CONFUSIONS]
