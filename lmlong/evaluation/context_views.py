"""Measurements on the same targets at each length: the loss, the loss by recurrence, how far the text before changes
the predictions, and the gain by a cache of counts. N targets."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmlong.data.token_dataset import prepare
from lmlong.errors import UsageError
from lmlong.evaluation import recurrence
from lmlong.evaluation import spans as cut
from lmlong.evaluation.count_cache import Counts, count_ngrams, fit, mix
from lmlong.evaluation.document_sums import Sums
from lmlong.evaluation.kept_steps import KeptSteps
from lmlong.evaluation.results import CACHES, AtLength, AtRecurrence, CacheGain, PerplexityReport
from lmlong.evaluation.scorer import Scorer, tokens_read
from lmlong.evaluation.spans import Blocks, Documents
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.model.language_model import LanguageModel
from lmlong.recipe.lengths import name_length
from lmlong.report.progress import Progress

COUNTED = 1 << 20
"""Tokens at the beginning of a training document that counts are taken of, which bounds their memory."""

COMPARED_TOKENS = 512
"""Tokens whose predictions are compared at once."""


class ScoredTargets(NamedTuple):
    """Targets of several texts: at each length their loss, and the counts of each kind of cache."""

    nats: dict[int, np.ndarray]
    counts: dict[int, dict[str, list[Counts]]]


class ContextViews:
    """The views of one model on one set of targets."""

    def __init__(
        self, scorer: Scorer, blocks: Blocks, lengths: Sequence[int], views: Sequence[str], progress: Progress
    ):
        self.scorer, self.blocks, self.lengths, self.views = scorer, blocks, lengths, views
        self.progress = progress
        self.targets = blocks.after(lengths[-1]).targets()
        self.sizes = scorer.sizes(self.targets.position)
        self.nats: dict[int, np.ndarray] = {}

    def sums(self, nats: np.ndarray, which: np.ndarray | slice = slice(None)) -> Sums:
        """Return the sums of some of the targets."""
        sums = self.scorer.documents.sums()
        sums.add_targets(self.targets.document[which], nats[which], self.sizes[which])
        return sums

    def fill(self, report: PerplexityReport) -> None:
        """Read the targets at each length, the longest first, and fill in the report."""
        kinds = recurrence.KINDS if "recurrence" in self.views else ()
        where = (self.scorer.text, self.scorer.documents, self.targets, self.scorer.tokenizer)
        buckets = [recurrence.buckets(kind, *where) for kind in kinds]
        longest = None
        for length in reversed(self.lengths):
            self.progress.begin(f"{report.name}: context {name_length(length)}")
            before, spans = self.scorer.seconds, self.blocks.after(length)
            if "remembrance" in self.views:
                predictions = self.scorer.hidden_predictions(spans, self.progress)
            else:
                predictions = self.scorer.predictions(spans, self.progress, f"context {length}")
            seconds = self.scorer.seconds - before
            self.nats[length] = predictions.nats
            if "context" in self.views:
                report.context.insert(0, AtLength(length, self.sums(predictions.nats), seconds))
            if "recurrence" in self.views:
                report.recurrence.insert(
                    0, AtRecurrence(length, *(self._by(bucket, predictions.nats) for bucket in buckets))
                )
            if "remembrance" in self.views and longest is not None:
                distance = divergence(self.scorer.model, longest.hidden, predictions.hidden)
                report.remembrance.insert(0, AtLength(length, self.sums(distance), seconds))
            longest = longest or predictions

    def _by(self, bucket: np.ndarray, nats: np.ndarray) -> list[Sums]:
        return [self.sums(nats, bucket == number) for number in range(len(recurrence.BUCKETS))]

    def fill_cache(self, report: PerplexityReport, fitted_on: ScoredTargets) -> None:
        """Fill in the gain by the counts of each cache at each length, with weights fitted on other targets."""
        counts = cache_counts(self.scorer, self.blocks, self.lengths)
        for length, nats in sorted(self.nats.items()):
            near = max((each for each in fitted_on.nats if each <= length), default=min(fitted_on.nats))
            mixed = {}
            for name in CACHES:
                weights = fit(fitted_on.nats[near], fitted_on.counts[near][name])
                mixed[name] = self.sums(mix(nats, counts[length][name], weights))
            report.cache.append(CacheGain(length, self.sums(nats), mixed))


def cache_counts(scorer: Scorer, blocks: Blocks, lengths: Sequence[int]) -> dict[int, dict[str, list[Counts]]]:
    """Return the counts of each kind of cache at each length."""
    targets = blocks.after(lengths[-1]).targets()
    begins = [blocks.after(length).targets().begin for length in lengths]
    whole = scorer.documents.begins[targets.document]
    *inside, everywhere = count_ngrams(scorer.text, scorer.documents, targets, [*begins, whole])
    return {
        length: {
            name: (inside[number] if cache.counts == "context" else everywhere)[cache.lowest - 1 :]
            for name, cache in CACHES.items()
        }
        for number, length in enumerate(lengths)
    }


def training_targets(
    loaded: TrainedLanguageModel, lengths: Sequence[int], targets: int, kept: KeptSteps | None = None
) -> ScoredTargets:
    """Return about `targets` targets of the text that a model was trained on, at each length its documents reach."""
    try:
        text = prepare(loaded.recipe.text, loaded.tokenizer)
    except UsageError as error:
        why = "--cache-baseline: its weights are fitted on the training text of the run, which cannot be read:"
        raise UsageError(f"{why} {error} Or leave the option out.") from None
    texts = [(file.tokens, _beginnings(cut.documents_of(file))) for file in text.train]
    reached = [length for length in lengths if any(cut.reached(documents, length) for _, documents in texts)]
    if not reached:
        raise UsageError(
            f"--cache-baseline: its weights are fitted on the training text of the run, of which no document has "
            f"{lengths[0]:,} tokens before a target. Give shorter --lengths, or leave the option out."
        )
    longest = reached[-1]
    long_texts = [text for text in texts if cut.reached(text[1], longest)]
    nats: list[dict[int, np.ndarray]] = []
    counts = []
    for number, (tokens, documents) in enumerate(long_texts):
        scorer = Scorer(loaded, tokens, documents, kept)
        blocks = cut.choose_blocks(documents, longest, cut.block_size(longest), targets // len(long_texts), 1)
        total = sum(tokens_read(blocks.after(length)) for length in reached)
        with Progress("fitting the cache on training text", total, "tokens") as progress:
            nats.append(
                {
                    length: scorer.predictions(
                        blocks.after(length), progress, f"{text.identity} {number} {length}"
                    ).nats
                    for length in reached
                }
            )
        counts.append(cache_counts(scorer, blocks, reached))
    return ScoredTargets(
        {length: np.concatenate([each[length] for each in nats]) for length in reached},
        {length: _joined([each[length] for each in counts]) for length in reached},
    )


def _beginnings(documents: Documents) -> Documents:
    """Return the beginnings of the documents, which are counted in bounded memory."""
    return documents._replace(ends=np.minimum(documents.ends, documents.begins + COUNTED))


def _joined(parts: Sequence[dict[str, list[Counts]]]) -> dict[str, list[Counts]]:
    """Concatenate the counts of several texts."""
    return {
        name: [
            Counts(*(np.concatenate(values) for values in zip(*orders, strict=True)))
            for orders in zip(*(part[name] for part in parts), strict=True)
        ]
        for name in CACHES
    }


@torch.inference_mode()
def divergence(model: LanguageModel, with_text: Tensor, without: Tensor) -> np.ndarray:
    """Return KL(p || q) of each target (N,) in nats, from hidden states (N, width) with the text before a point, which
    give p, and without it, which give q.

    If p were the truth, this is how much higher the loss would be without that text. Unlike a change of the loss it
    never cancels, and it is 0 only if the text is forgotten.
    """
    nats = [np.zeros(0)]
    for pair in zip(with_text.split(COMPARED_TOKENS), without.split(COMPARED_TOKENS), strict=True):
        log_p, log_q = (model.logits(hidden).double().log_softmax(-1) for hidden in pair)
        nats.append((log_p.exp() * (log_p - log_q)).sum(-1).cpu().numpy())
    return np.concatenate(nats)
