"""What is measured on the same targets at each length: the loss, what it is for targets by recurrence, how far the text
before changes the predictions, and what a cache of counts adds."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from lmlong.data.token_dataset import prepare
from lmlong.errors import UsageError
from lmlong.evaluation import recurrence
from lmlong.evaluation import spans as cut
from lmlong.evaluation.count_cache import Counts, count_ngrams, fit, mix
from lmlong.evaluation.document_sums import Sums
from lmlong.evaluation.remembrance import divergence
from lmlong.evaluation.results import CACHES, AtLength, AtRecurrence, CacheGain, PerplexityReport
from lmlong.evaluation.scorer import Scorer
from lmlong.evaluation.spans import Blocks, Documents
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.recipe.lengths import name_length

COUNTED = 1 << 20
"""Tokens of a training document in which counts are taken."""


class ScoredTargets(NamedTuple):
    """Targets in several texts: at each length their loss, and the counts of each kind of cache."""

    nats: dict[int, np.ndarray]
    counts: dict[int, dict[str, list[Counts]]]


class ContextViews:
    """The views of one model on one choice of targets."""

    def __init__(self, scorer: Scorer, blocks: Blocks, lengths: Sequence[int], views: Sequence[str], bar: tqdm):
        self.scorer, self.blocks, self.lengths, self.views, self.bar = scorer, blocks, lengths, views, bar
        self.targets = blocks.after(lengths[-1]).targets()
        self.sizes = scorer.sizes(self.targets.place)
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
            self.bar.set_description(f"{report.name}: context {name_length(length)}")
            begun = time.perf_counter()
            found = self.scorer.predictions(self.blocks.after(length), self.bar)
            seconds = time.perf_counter() - begun
            self.nats[length] = found.nats
            report.seconds += seconds
            if "context" in self.views:
                report.context.insert(0, AtLength(length, self.sums(found.nats), seconds))
            if "recurrence" in self.views:
                report.recurrence.insert(0, AtRecurrence(length, *(self._by(bucket, found.nats) for bucket in buckets)))
            if "remembrance" in self.views and longest is not None:
                distance = divergence(self.scorer.model, longest.hidden, found.hidden)
                report.remembrance.insert(0, AtLength(length, self.sums(distance), seconds))
            longest = longest or found

    def _by(self, bucket: np.ndarray, nats: np.ndarray) -> list[Sums]:
        return [self.sums(nats, bucket == number) for number in range(len(recurrence.BUCKETS))]

    def fill_cache(self, report: PerplexityReport, fitted_on: ScoredTargets) -> None:
        """Fill in what the counts of each cache add at each length, with weights fitted on other targets."""
        counts = cache_counts(self.scorer, self.blocks, self.lengths)
        for length, nats in sorted(self.nats.items()):
            near = max((known for known in fitted_on.nats if known <= length), default=min(fitted_on.nats))
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


def training_targets(loaded: TrainedLanguageModel, lengths: Sequence[int], targets: int, bar: tqdm) -> ScoredTargets:
    """Return about so many targets of the text that a model was trained on, at each length that its documents reach."""
    try:
        files = prepare(loaded.recipe.text, loaded.tokenizer).train
    except UsageError as error:
        told = "--cache-baseline: its weights are fitted on the text that the run was trained on, and of that"
        raise UsageError(f"{told} {error} Or leave the option out.") from None
    texts = [(file.tokens, _beginnings(cut.documents_of(file))) for file in files]
    reached = [length for length in lengths if any(cut.reached(documents, length) for _, documents in texts)]
    if not reached:
        raise UsageError(
            f"--cache-baseline: its weights are fitted on the text that the run was trained on, and no document of "
            f"that has {lengths[0]:,} tokens before a target. Give shorter --lengths, or leave the option out."
        )
    longest = reached[-1]
    long_texts = [text for text in texts if cut.reached(text[1], longest)]
    nats: list[dict[int, np.ndarray]] = []
    counts = []
    for tokens, documents in long_texts:
        scorer = Scorer(loaded.model, tokens, documents, loaded.tokenizer, loaded.device)
        blocks = cut.choose_blocks(documents, longest, cut.block_size(longest), targets // len(long_texts), 1)
        nats.append({length: scorer.predictions(blocks.after(length), bar).nats for length in reached})
        counts.append(cache_counts(scorer, blocks, reached))
    return ScoredTargets(
        {length: np.concatenate([each[length] for each in nats]) for length in reached},
        {length: _joined([each[length] for each in counts]) for length in reached},
    )


def _beginnings(documents: Documents) -> Documents:
    """Return the documents without what is too far into them to be counted in bounded memory."""
    return documents._replace(ends=np.minimum(documents.ends, documents.begins + COUNTED))


def _joined(parts: Sequence[dict[str, list[Counts]]]) -> dict[str, list[Counts]]:
    """Return the counts of several texts as of one."""
    return {
        name: [
            Counts(*(np.concatenate(values) for values in zip(*orders, strict=True)))
            for orders in zip(*(part[name] for part in parts), strict=True)
        ]
        for name in CACHES
    }
