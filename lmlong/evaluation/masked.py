"""How well an encoder finds out hidden tokens, on the same hidden places every time."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from lmlong.evaluation.sums import Sums
from lmlong.inference.loading import Trained
from lmlong.model.language_model import parameters
from lmlong.model.loss import IGNORED
from lmlong.text.batches import in_batches
from lmlong.text.masking import Masker, Pieces
from lmlong.text.token_file import TokenFile


class MaskedReport(NamedTuple):
    """What was found of one encoder."""

    name: str
    checkpoint: str
    parameters: int
    length: int  # tokens of a sequence, at most
    rows: str  # windows or documents, which the sums tell apart
    share: float  # of the tokens, hidden
    sums: Sums

    @property
    def error(self) -> float:
        """Standard error of the perplexity, from that of its logarithm."""
        return self.sums.totals.perplexity * self.sums.nats_error


def measure(name: str, trained: Trained, text: TokenFile) -> MaskedReport:
    """What is lost on the hidden tokens of a text, read as the encoder's training text was."""
    options = trained.recipe.text
    whole = options.rows == "documents"
    pieces = Pieces.of(text, options.sequence_length, whole)
    # pieces of one document are no draws of their own
    owners = np.searchsorted(text.starts, pieces.begins, "right") - 1 if whole else np.arange(len(pieces.begins))
    sums, rows = Sums(int(owners.max()) + 1), trained.recipe.training.batch_size
    batches = pieces.batches(text.tokens, Masker(options.masking, trained.tokenizer), rows)
    for numbers, batch in zip(in_batches(len(owners), rows, 1), batches, strict=True):
        tokens, targets, padding = (torch.from_numpy(part).to(trained.device) for part in batch)
        lost = trained.model.nats(tokens, targets, padding).double().sum(1).tolist()
        for owner, nats, row in zip(owners[numbers], lost, batch.targets, strict=True):
            hidden = row[row != IGNORED]
            sums.add(int(owner), nats, len(hidden), int(trained.tokenizer.token_bytes[hidden].sum()))
    return MaskedReport(
        name,
        str(trained.checkpoint),
        parameters(trained.model),
        options.sequence_length,
        options.rows,
        options.masking.share,
        sums,
    )


def table(reports: Sequence[MaskedReport]) -> str:
    """A line for each report."""
    lines = [f"{'':24}{'perplexity':>12}{'±':>9}{'nats/token':>12}{'±':>9}{'hidden':>10}  over"]
    for report in reports:
        sums, totals = report.sums, report.sums.totals
        lines.append(
            f"{report.name[-23:]:24}{totals.perplexity:>12.3f}{_error(report.error)}{totals.nats_per_token:>12.4f}"
            f"{_error(sums.nats_error)}{totals.tokens:>10,}  {sums.documents:,} {report.rows}"
        )
    return "\n".join(lines)


def plain(reports: Sequence[MaskedReport]) -> dict[str, Any]:
    """The reports as plain values."""
    return {"runs": [_plain(report) for report in reports]}


def _plain(report: MaskedReport) -> dict[str, Any]:
    totals = report.sums.totals
    return {
        "name": report.name,
        "checkpoint": report.checkpoint,
        "objective": "masked",
        "parameters": report.parameters,
        "trained_length": report.length,
        "hidden_share": report.share,
        "hidden_tokens": totals.tokens,
        report.rows: report.sums.documents,
        "nats_per_token": totals.nats_per_token,
        "nats_per_token_error": _number(report.sums.nats_error),
        "perplexity": totals.perplexity,
        "perplexity_error": _number(report.error),
    }


def _error(value: float) -> str:
    return f"{'-' if math.isnan(value) else format(value, '.4f'):>9}"


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
