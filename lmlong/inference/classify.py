"""The labels of texts of any length, by a model that was trained with objective: label.

A causal model reads a long text piece by piece, along its state. An encoder reads the first `longest` tokens.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lmlong.inference.trained_model import TrainedModel
from lmlong.model.base import TextModel
from lmlong.model.encoder import Encoder
from lmlong.model.finite import not_finite
from lmlong.model.metrics import label_logits
from lmlong.report.table import plural

MAX_ROWS, MAX_TOKENS = 64, 16_384
"""Most texts of a batch, and most tokens of all of them together, padding included."""


class Classification(NamedTuple):
    """The probabilities of the labels of a text."""

    probabilities: dict[str, float]
    tokens: int
    """The tokens of the text."""
    read: int
    """Those that were read; an encoder reads only the beginning of a long text."""

    @property
    def label(self) -> str:
        """The most probable label."""
        return max(self.probabilities, key=self.probabilities.__getitem__)


@dataclass(frozen=True, repr=False)
class TrainedClassifier(TrainedModel):
    """A trained model that predicts the label of a text."""

    @property
    def labels(self) -> list[str]:
        """The labels that it chooses from."""
        return self.recipe.label_names or []

    def classify(self, text: str) -> Classification:
        """Return the probability of each label of a text.

        >>> model = lmlong.load_classifier("runs/reviews")
        >>> model.classify("A triumph from beginning to end.").label
        'pos'

        A causal model reads a text of any length. An encoder reads as many tokens as a sequence had in training, and
        warns if the text is longer.
        """
        return self.classify_all([text])[0]

    def classify_all(self, texts: Sequence[str]) -> list[Classification]:
        """Return it for each of several texts, faster."""
        found = self.classify_tokens([self.tokens_of(text) for text in texts])
        if cut := sum(each.read < each.tokens for each in found):
            what = f"{cut} of {plural(len(texts), 'text')}"
            warnings.warn(f"{what} cut to {self.recipe.text.sequence_length:,} tokens, as in training", stacklevel=3)
        return found

    def tokens_of(self, text: str) -> list[int]:
        """Return the tokens of a document, from bos to eos."""
        return [self.tokenizer.bos, *self.tokenizer.encode(text), self.tokenizer.eos]

    def classify_tokens(self, documents: Sequence[Sequence[int]]) -> list[Classification]:
        """Return the same for documents of tokens, from bos to eos, without a warning."""
        return classify(self.model, self.tokenizer.eos, self.labels, documents)


def classify(model: TextModel, eos: int, names: Sequence[str], rows: Sequence[Sequence[int]]) -> list[Classification]:
    """Return the probabilities of the labels `names` of documents of tokens, each from bos to eos."""
    cut = [_cut(model, row, eos) for row in rows]
    found: list[Classification | None] = [None] * len(rows)
    for numbers in _batches([len(row) for row in cut]):
        for number, probabilities in zip(numbers, _probabilities(model, [cut[n] for n in numbers]), strict=True):
            by_name = dict(zip(names, probabilities.tolist(), strict=True))
            found[number] = Classification(by_name, len(rows[number]), len(cut[number]))
    return [each for each in found if each is not None]


def _cut(model: TextModel, row: Sequence[int], eos: int) -> list[int]:
    """Return the tokens of a document that a model reads, which end with eos as in training."""
    if isinstance(model, Encoder) and len(row) > model.longest:
        return [*row[: model.longest - 1], eos]
    return list(row)


def _batches(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield the indices of rows in batches, the longest first."""
    order, begin = sorted(range(len(sizes)), key=lambda number: -sizes[number]), 0
    while begin < len(order):
        end = begin + max(1, min(MAX_ROWS, MAX_TOKENS // sizes[order[begin]]))
        yield order[begin:end]
        begin = end


@torch.inference_mode()
def _probabilities(model: TextModel, rows: Sequence[Sequence[int]]) -> Tensor:
    """Return the probabilities (B, labels) of rows of tokens, on the CPU."""
    device, longest = model.embedding.weight.device, max(map(len, rows))
    last = torch.tensor([len(row) - 1 for row in rows], device=device)
    tokens = torch.tensor([[*row, *[row[-1]] * (longest - len(row))] for row in rows], device=device)
    at = torch.arange(longest, device=device)
    mask = at > last[:, None] if isinstance(model, Encoder) else None
    logits = label_logits(model, tokens, last, mask)
    if not logits.isfinite().all():
        raise not_finite(model, tokens, None, mask)
    return logits.float().cpu().double().softmax(-1)
