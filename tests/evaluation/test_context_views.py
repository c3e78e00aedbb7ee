"""The views of the same targets, on sources and models of which the answer is known in closed form."""

import math

import numpy as np
import pytest
import torch
from evaluation.oracles import Oracle, Repeated, text_of
from tqdm import tqdm

from lmlong.data.token_file import TokenFile
from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.evaluation import spans as cut
from lmlong.evaluation.context_views import ContextViews, ScoredTargets, cache_counts
from lmlong.evaluation.recurrence import BUCKETS
from lmlong.evaluation.results import PerplexityReport
from lmlong.evaluation.scorer import Scorer
from lmlong.evaluation.spans import Spans, documents_of
from lmlong.model.state_size import StateSize

EVERY = 100
"""Tokens after which each token recurs."""
SOURCE = Repeated(symbols=120, distance=EVERY, wrong=0.1)
UNKNOWN, KNOWN = math.log(120), -math.log(0.9)
LENGTHS = [40, 160, 640]
VIEWS = ("context", "recurrence", "remembrance")


def again_and_again() -> TokenFile:
    """Documents in which each token is one of a hundred in turn."""
    random = np.random.default_rng(0)
    texts = [np.tile(random.permutation(120)[:EVERY], 10) for _ in range(4)]
    return TokenFile(np.concatenate(texts), np.arange(4) * 10 * EVERY)


def viewed(memory: int = EVERY, cache: bool = False) -> PerplexityReport:
    """What an oracle of so much memory is found to know."""
    text = again_and_again()
    documents = documents_of(text)
    scorer = Scorer(Oracle(SOURCE, memory), text.tokens, documents, ByteTokenizer(), torch.device("cpu"))
    blocks = cut.choose_blocks(documents, LENGTHS[-1], 80, 320, 1)
    report = PerplexityReport("oracle", "", 0, StateSize((0, 0), (0, 0)), trained_length=16, lengths=LENGTHS)
    views = ContextViews(scorer, blocks, LENGTHS, VIEWS, tqdm(disable=True))
    views.fill(report)
    if cache:
        views.fill_cache(report, ScoredTargets(views.nats, cache_counts(scorer, blocks, LENGTHS)))
    return report


def test_targets_are_in_the_bucket_of_where_they_were_last_seen() -> None:
    report = viewed()
    assert [point.length for point in report.recurrence] == LENGTHS
    for point, expected in zip(report.recurrence, [UNKNOWN, KNOWN, KNOWN], strict=True):
        for name, sums in zip(BUCKETS, point.token, strict=True):
            assert sums.totals.tokens == (320 if name == "< 512" else 0)
        assert point.token[2].totals.nats_per_token == pytest.approx(expected)
        # symbols above 32 are no spaces: a word is what stands between two of the few that are
        assert sum(sums.totals.tokens for sums in point.word) == 320
    change, error = report.recurrence[1].token[2].above(report.recurrence[0].token[2])
    assert (change, error) == (pytest.approx(KNOWN - UNKNOWN), pytest.approx(0, abs=1e-9))


def test_remembrance_ends_where_the_model_forgets() -> None:
    entropy = SOURCE.entropy(EVERY)
    near, far = viewed().remembrance
    assert (near.length, far.length) == (40, 160)
    assert near.sums.totals.nats_per_token == pytest.approx(UNKNOWN - entropy)  # KL from what is known to the even one
    assert far.sums.totals.nats_per_token == 0
    forgetful = viewed(memory=EVERY - 1)
    assert [point.sums.totals.nats for point in forgetful.remembrance] == [0, 0]
    assert all(point.sums.totals.nats_per_token == pytest.approx(UNKNOWN) for point in forgetful.context)


def test_counts_find_what_a_forgetful_model_leaves_lying() -> None:
    forgetful = viewed(memory=EVERY - 1, cache=True)
    assert [at.length for at in forgetful.cache] == LENGTHS
    near, far = forgetful.cache[0], forgetful.cache[-1]
    assert near.mixed["context"].above(near.model)[0] == pytest.approx(0, abs=1e-9)
    # counts say what follows for certain, and the weights say so too, but for the one token of each fit
    assert far.mixed["context"].totals.nats_per_token < 0.05
    assert near.mixed["document"].totals.nats_per_token < 0.05
    assert near.mixed["document_unigram"].totals.nats_per_token < 0.05
    knowing = viewed(cache=True).cache[-1]
    assert 0 <= -knowing.mixed["context"].above(knowing.model)[0] <= KNOWN


def test_logits_are_computed_of_targets_alone() -> None:
    class Counted(Oracle):
        rows = 0

        def target_nll(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            self.rows += len(hidden)
            return super().target_nll(hidden, targets)

    text = text_of(SOURCE, [500, 400])
    model = Counted(SOURCE)
    scorer = Scorer(model, text.tokens, documents_of(text), ByteTokenizer(), torch.device("cpu"))
    spans = Spans(np.array([0, 1]), np.array([0, 510]), np.array([490, 890]), np.array([500, 893]))
    found = scorer.predictions(spans, tqdm(disable=True))
    assert (len(found.nats), model.rows) == (13, 13)
