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
from lmlong.inference.loading import TrainedClassifier
from lmlong.model.base import count_parameters
from lmlong.model.device import Precision, autocast
from lmlong.report.json_values import json_keys, json_values
from lmlong.report.progress import each
from lmlong.report.report import Report, Table
from lmlong.report.table import Column, format_range, plural, with_error

AT_ONCE = 256
"""Documents that are sorted by length and read in batches together."""

SHORTEST = 64
"""Upper bound of the first class of lengths; each further one is twice as long."""


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
    def correct(self) -> int:
        return int((self.labels == self.predicted).sum())

    @property
    def accuracy(self) -> Estimate:
        """The share that is correct, with its binomial standard error."""
        share = self.correct / self.documents if self.documents else math.nan
        return Estimate(share, math.sqrt(share * (1 - share) / self.documents) if self.documents else math.nan)

    @property
    def lengths(self) -> tuple[int, int]:
        """The fewest and most tokens of a document."""
        return int(self.tokens.min()), int(self.tokens.max())

    def of(self, chosen: np.ndarray) -> "Predictions":
        """Return those of some of the documents."""
        return Predictions(*(part[chosen] for part in self))

    def by_length(self) -> list["Predictions"]:
        """Return those of documents of up to SHORTEST tokens, of up to twice as many, and so on."""
        classes = np.ceil(np.log2(np.maximum(self.tokens, SHORTEST) / SHORTEST)).astype(int)
        return [self.of(classes == number) for number in np.unique(classes)]


@json_keys(
    *("name", "checkpoint", "parameters", "trained_length", "precision", "documents=all.documents"),
    *("correct=all.correct", "accuracy=all.accuracy.value", "accuracy_error=all.accuracy.error"),
    *("nats_per_document=nats", "majority", "cut", "labels", "confusion", "by_length"),
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
    def nats(self) -> float:
        """The mean loss of a document."""
        return float(self.all.nats.mean())

    @property
    def confusion(self) -> dict[str, dict[str, int]]:
        """The number of documents of each label, by the label that the model predicts."""
        counts = Counter(zip(self.all.labels.tolist(), self.all.predicted.tolist(), strict=True))
        return {
            label: {predicted: counts[row, column] for column, predicted in enumerate(self.labels)}
            for row, label in enumerate(self.labels)
        }

    @property
    def by_length(self) -> list[dict[str, float]]:
        keys = ("from_tokens", "to_tokens", "documents", "accuracy", "accuracy_error")
        rows = ((*part.lengths, part.documents, *part.accuracy) for part in self.all.by_length())
        return [dict(zip(keys, row, strict=True)) for row in rows]


def measure_labels(
    name: str,
    trained: TrainedClassifier,
    files: Sequence[str | Path] = (),
    tokens: int | None = None,
    precision: Precision | None = None,
) -> LabelReport:
    """Return the predictions for the whole documents in the first `tokens` of the held-out text, or of `files`, whose
    labels are in the field that the recipe names; by default in the number format of training."""
    dataset = prepare(text_options(trained, files), trained.tokenizer)
    chosen, documents = trained.set_up_evaluation(precision), _documents(dataset.validation, tokens)
    labels = label_ids(dataset.validation.labels[: len(documents)], trained.labels)
    parts = [documents[begin : begin + AT_ONCE] for begin in range(0, len(documents), AT_ONCE)]
    found = []
    for part in each(parts, name, len(parts), "batches"):
        with autocast(trained.device, chosen):
            found += trained.classify_tokens(part)
    probabilities = np.array([[*each.probabilities.values()] for each in found])
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
        Predictions(labels, probabilities.argmax(1), nats, np.array([each.tokens for each in found])),
        None if files else float((labels == common).mean()),
        sum(each.read < each.tokens for each in found),
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
    Column("nats", 8, ".3f", value="nats"),
    Column("documents", 11, ",", value="all.documents"),
    Column("  run", 0, align="<", value=lambda report: f"  {report.name}"),
]
BY_LENGTH = [
    Column("tokens", 18, value=lambda part: format_range(*part.lengths)),
    Column("documents", 11, ",", value="documents"),
    *with_error(Column("accuracy", 10, ".3f", value="accuracy")),
]


def label_report(reports: Sequence[LabelReport]) -> Report:
    """Return a line for each run, and for each run its accuracy by length and its confusion of labels."""
    precisions = ", ".join(dict.fromkeys(report.precision for report in reports))
    parts: list[str | Table] = [Table(f"labels of documents, precision {precisions}", COLUMNS, reports)]
    for report in reports:
        parts.append(Table(f"{report.name}: by length", BY_LENGTH, report.all.by_length()))
        parts.append(_confusion_table(report))
        if report.cut:
            cut = f"{report.cut:,} of {plural(report.all.documents, 'document')}"
            parts.append(f"{report.name}: {cut} cut to {report.trained_length:,} tokens, the longest in training")
    return Report(parts, {"runs": [{"objective": "label", **json_values(report)} for report in reports]})


MOST_COLUMNS = 8
"""Most labels whose confusion is shown as a table; JSON holds it for any number."""


def _confusion_table(report: LabelReport) -> str | Table:
    """Return the numbers of documents by label and prediction, or the most frequent confusions of many labels."""
    title = f"{report.name}: documents of each label (rows), by prediction"
    if len(report.labels) <= MOST_COLUMNS:
        width = max(10, *(len(label) + 2 for label in report.labels))
        columns = [Column("", width), *(Column(label, width, ",") for label in report.labels)]
        return Table(title, columns, [[label, *row.values()] for label, row in report.confusion.items()])
    wrong = [
        (count, label, predicted)
        for label, row in report.confusion.items()
        for predicted, count in row.items()
        if count and label != predicted
    ]
    columns = [Column("documents", 10, ","), Column("  label", 0, align="<"), Column(" predicted", 0, align="<")]
    rows = [[count, f"  {label}", f" as {predicted}"] for count, label, predicted in sorted(wrong)[::-1][:MOST_COLUMNS]]
    return Table(f"{report.name}: the most frequent confusions", columns, rows)
