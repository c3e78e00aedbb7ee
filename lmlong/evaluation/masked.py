"""Perplexity of an encoder on hidden tokens, hidden at the same positions every time."""

from typing import NamedTuple

import numpy as np
import torch

from lmlong.data.batches import in_batches
from lmlong.data.masking import Masker, ValidationPieces
from lmlong.data.token_file import TokenFile
from lmlong.evaluation.document_sums import Sums
from lmlong.inference.loading import TrainedModel
from lmlong.model.base import count_parameters
from lmlong.model.loss import IGNORED
from lmlong.model.precision import Precision, autocast, evaluation_precision


class MaskedReport(NamedTuple):
    """The sums of one encoder."""

    name: str
    checkpoint: str
    parameters: int
    length: int  # tokens of a sequence, at most
    rows: str  # windows or documents, which the sums tell apart
    share: float  # of the tokens, hidden
    sums: Sums
    precision: Precision

    @property
    def error(self) -> float:
        """Standard error of the perplexity, from that of its logarithm."""
        return self.sums.totals.perplexity * self.sums.nats_error


def measure_masked(
    name: str, trained: TrainedModel, text: TokenFile, precision: Precision | None = None
) -> MaskedReport:
    """Return the loss on the hidden tokens of a text that is cut into sequences as in training, by default also in the
    number format of training."""
    chosen = evaluation_precision(precision, trained.recipe.training.precision, trained.device)
    options = trained.recipe.text
    whole = options.rows == "documents"
    pieces = ValidationPieces.of(text, options.sequence_length, whole)
    # pieces of one document are no draws of their own
    owners = np.searchsorted(text.starts, pieces.begins, "right") - 1 if whole else np.arange(len(pieces.begins))
    sums, rows = Sums(int(owners.max()) + 1), trained.recipe.training.batch_size
    batches = pieces.batches(text.tokens, Masker(options.masking, trained.tokenizer), rows)
    for numbers, batch in zip(in_batches(len(owners), rows, 1), batches, strict=True):
        tokens, targets, padding = (torch.from_numpy(part).to(trained.device) for part in batch)
        with autocast(trained.device, chosen):
            nll, _ = trained.model.token_nll(tokens, targets, padding)
        lost = nll.cpu().double().sum(1).tolist()
        for owner, nats, row in zip(owners[numbers], lost, batch.targets, strict=True):
            hidden = row[row != IGNORED]
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
    )
