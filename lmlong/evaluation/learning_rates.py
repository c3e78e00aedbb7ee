"""Rates of learning while reading, fitted to the held-out text of a run."""

import time
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmlong.checkpoint.learning_rates import write_rates
from lmlong.evaluation.perplexity import validation_text
from lmlong.evaluation.spans import documents_of
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.model.language_model import LanguageModel
from lmlong.model.learning.read import Text, score
from lmlong.model.learning.state import DEFAULT_RATES, Rates, init_learned

TOKENS, OF_DOCUMENT, LEAST = 32_768, 16_384, 4_096
"""Tokens to fit to, of each document if there are several, and the number below which nothing is fitted."""

SECONDS = 60.0
"""Time after which the best rates so far are taken."""

FACTORS = (2.0, 0.5)
"""A rate is multiplied by each of these as long as the loss falls."""


class Fit(NamedTuple):
    """Fitted rates, and the nats per token of the text that they were fitted to."""

    rates: Rates
    by_default: float
    fitted: float
    tokens: int


class Document(NamedTuple):
    """The beginning of a document, as the model has read it."""

    text: Text
    targets: Tensor  # (1, T)


@torch.inference_mode()
def fit_rates(loaded: TrainedLanguageModel, seconds: float = SECONDS) -> Fit | None:
    """Return the rates with which the output layer learns most from the held-out text of a run, and save them in its
    checkpoint; None if that text is too short.

    One rate after the other is doubled or halved as long as that helps, starting from the default.
    """
    until = time.monotonic() + seconds
    documents = _read(loaded)
    tokens = sum(document.targets.shape[1] for document in documents)
    if tokens < LEAST:
        return None

    def nats(rates: Rates) -> float:
        return sum(_nats(document, loaded.model, rates) for document in documents) / tokens

    best = DEFAULT_RATES
    lowest = by_default = nats(best)
    for name in ("rate", "prior", "bias_rate", "rate"):
        for factor in FACTORS:
            while time.monotonic() < until:
                changed = best._replace(**{name: getattr(best, name) * factor})
                if (loss := nats(changed)) >= lowest:
                    break
                best, lowest = changed, loss
    write_rates(loaded.checkpoint, best)
    return Fit(best, by_default, lowest, tokens)


def _read(loaded: TrainedLanguageModel) -> list[Document]:
    """Return the beginnings of held-out documents, up to TOKENS in all."""
    model, text = loaded.model, validation_text(loaded)
    bounds = documents_of(text)
    longest, read, left = max(OF_DOCUMENT, TOKENS // max(1, len(bounds.begins))), [], TOKENS
    for begin, size in zip(bounds.begins.tolist(), bounds.sizes.tolist(), strict=True):
        end = begin + min(size, longest, left)
        if end - begin < 2:
            break
        tokens = torch.from_numpy(text.tokens[begin:end].astype(np.int64))[None].to(loaded.device)
        hidden, state = [], None
        for piece in tokens[:, :-1].split(model.piece(1), dim=1):
            of_piece, state = model.hidden_states(piece, state)
            hidden.append(of_piece)
        read.append(Document(Text(tokens[:, :-1], torch.cat(hidden, dim=1), tokens.new_zeros(1)), tokens[:, 1:]))
        left -= end - begin
    return read


def _nats(document: Document, model: LanguageModel, rates: Rates) -> float:
    """Return the summed -log p of a document that is learned from with these rates."""
    text, targets = document
    weight = model.lm_head.matrix(torch.float32).float()
    nll, _ = score(
        weight, text, targets, init_learned("output", text.position, weight), rates.for_hidden(model.norm.weight)
    )
    return float(nll.double().sum())
