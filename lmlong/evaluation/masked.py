"""Perplexity of an encoder on hidden tokens, hidden at the same positions every time."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from lmlong.data.baselines import unigram_counts
from lmlong.data.batches import in_batches
from lmlong.data.masking import Masker, ValidationPieces
from lmlong.data.token_dataset import TokenDataset, prepare
from lmlong.evaluation.document_sums import Sums
from lmlong.evaluation.perplexity import validation_text
from lmlong.inference.trained_model import TrainedModel
from lmlong.model.base import count_parameters
from lmlong.model.device import Precision, autocast, evaluation_precision
from lmlong.model.finite import is_finite, not_finite
from lmlong.model.loss import IGNORED
from lmlong.model.metrics import text_nll
from lmlong.report.json_values import json_keys, json_values
from lmlong.report.progress import each
from lmlong.report.report import Report, Table
from lmlong.report.table import Column, with_error


@json_keys(
    *("name", "checkpoint", "parameters", "trained_length=length", "precision", "hidden_share=share"),
    *("hidden_tokens=sums.totals.tokens", "nats_per_token=sums.totals.nats_per_token"),
    *("nats_per_token_error=sums.nats_error", "perplexity=sums.totals.perplexity", "perplexity_error=error"),
    "unigram_perplexity=unigram",
)
class MaskedReport(NamedTuple):
    """The sums of one encoder."""

    name: str
    checkpoint: str
    parameters: int
    length: int  # most tokens of a sequence
    rows: str  # "windows" or "documents": what the sums are kept for
    share: float  # of the tokens, hidden
    sums: Sums
    precision: Precision
    unigram: float | None  # perplexity by the frequency of each token in the training text; None for other text

    @property
    def error(self) -> float:
        """Standard error of the perplexity, from that of its logarithm."""
        return self.sums.totals.perplexity * self.sums.nats_error


COLUMNS = [
    *with_error(Column("perplexity", 10, ".3f", value=lambda report: (report.sums.totals.perplexity, report.error))),
    Column("unigram", 11, ".3f", value="unigram"),
    *with_error(Column("nats/token", 12, ".4f", value="sums.per_token")),
    Column("hidden", 9, ",", value="sums.totals.tokens"),
    Column("errors over", 17, value=lambda report: f"{report.sums.documents:,} {report.rows}"),
    Column("  run", 0, align="<", value=lambda report: f"  {report.name}"),
]


def measure_masked(
    name: str,
    trained: TrainedModel,
    files: Sequence[str | Path] = (),
    tokens: int | None = None,
    precision: Precision | None = None,
) -> MaskedReport:
    """Return the loss on the hidden tokens of the first `tokens` of the held-out text, or of `files`, which is cut into
    sequences as in training; by default also in the number format of training. For the held-out text, the perplexity
    of a unigram model of the training text is measured too."""
    dataset = None if files else prepare(trained.recipe.text, trained.tokenizer)
    text = dataset.validation.first(tokens) if dataset else validation_text(trained, files, tokens)
    chosen = evaluation_precision(precision, trained.recipe.training.precision, trained.device)
    options = trained.recipe.text
    whole = options.rows == "documents"
    pieces = ValidationPieces.of(text, options.sequence_length, whole)
    # pieces of one document are no draws of their own
    owners = np.searchsorted(text.starts, pieces.begins, "right") - 1 if whole else np.arange(len(pieces.begins))
    sums, rows = Sums(int(owners.max()) + 1), trained.recipe.training.batch_size
    batches = pieces.batches(text.tokens, Masker(options.masking, trained.tokenizer), rows)
    count = -(-len(owners) // rows)
    hidden_tokens = np.zeros(trained.tokenizer.vocabulary, np.int64)
    shown = each(zip(in_batches(len(owners), rows, 1), batches, strict=True), name, count, "batches")
    for numbers, batch in shown:
        inputs, targets, padding = (torch.from_numpy(part).to(trained.device) for part in batch)
        with autocast(trained.device, chosen):
            nll, _ = text_nll(trained.model, inputs, targets, padding)
            if not is_finite(nll):
                raise not_finite(trained.model, inputs, None, padding)
        lost = nll.cpu().double().sum(1).tolist()
        for owner, nats, row in zip(owners[numbers], lost, batch.targets, strict=True):
            hidden = row[row != IGNORED]
            hidden_tokens += np.bincount(hidden, minlength=len(hidden_tokens))
            sums.add(int(owner), nats, len(hidden), int(trained.tokenizer.token_bytes[hidden].sum()))
    return MaskedReport(
        name,
        str(trained.checkpoint),
        count_parameters(trained.model),
        options.sequence_length,
        options.rows,
        options.masking.share,
        sums,
        chosen,
        _unigram_perplexity(dataset, hidden_tokens) if dataset else None,
    )


def _unigram_perplexity(dataset: TokenDataset, seen: np.ndarray) -> float:
    """Return the perplexity of tokens that occur `seen` times (V,), by their frequency in the training text. The ends
    of documents are never hidden, so they do not count."""
    tokenizer = dataset.tokenizer
    counts = unigram_counts(dataset.train, dataset.weights, tokenizer)
    counts[[tokenizer.bos, tokenizer.eos]] = 0
    occurs = seen > 0
    return math.exp(-(seen[occurs] * np.log(counts[occurs] / counts.sum())).sum() / seen.sum())


def masked_report(reports: Sequence[MaskedReport]) -> Report:
    """Return a line for each encoder; in JSON its sizes, options and ratios."""
    precisions = ", ".join(dict.fromkeys(report.precision for report in reports))
    runs = [{**json_values(report), "objective": "masked", report.rows: report.sums.documents} for report in reports]
    return Report([Table(f"prediction of hidden tokens, precision {precisions}", COLUMNS, reports)], {"runs": runs})
