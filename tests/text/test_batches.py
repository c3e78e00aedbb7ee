"""A batch follows from its number; epochs cover the text; validation counts every token once."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmlong.text.batches import IGNORED, Batch, TrainingBatches, validation_batches
from lmlong.text.shuffle import shuffled

BOS, EOS = 1, 2
LENGTH = 8


def text(size: int, first: int = 10) -> np.ndarray:
    """Distinct tokens, as documents of ten."""
    tokens = np.arange(first, first + size, dtype=np.uint16)
    tokens[::10], tokens[9::10] = BOS, EOS
    return tokens


def batches(*sources: np.ndarray, weights: tuple[float, ...] = (1.0,), rows: int = 4, seed: int = 0) -> TrainingBatches:
    return TrainingBatches(sources, weights, BOS, EOS, sequence_length=LENGTH, batch_size=rows, seed=seed)


def streams(*sources: np.ndarray, weights: tuple[float, ...] = (1.0,), rows: int = 4) -> TrainingBatches:
    return TrainingBatches(sources, weights, BOS, EOS, LENGTH, rows, 0, streams=True)


def equal(first: Batch, second: Batch) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))


def test_targets_and_starts() -> None:
    tokens = np.array([1, 7, 8, 2, 1, 9, 2], dtype=np.uint16)
    (batch,) = validation_batches(tokens, BOS, EOS, length=8, rows=4)
    assert batch.tokens.tolist() == [[1, 7, 8, 2, 1, 9, 2, 2]]
    assert batch.targets.tolist() == [[7, 8, 2, IGNORED, 9, 2, IGNORED, IGNORED]]
    assert batch.starts.tolist() == [[True, False, False, False, True, False, False, False]]
    assert [array.dtype for array in batch] == [np.int64, np.int64, np.bool_]


def test_a_batch_is_a_function_of_its_number() -> None:
    one, other = batches(text(1000)), batches(text(1000))
    for step in (0, 1, 500, 10**9):
        assert equal(one.batch(step), other.batch(step))
    assert not equal(one.batch(0), one.batch(1))
    assert not equal(one.batch(0), batches(text(1000), seed=1).batch(0))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_one_order(ranks: int) -> None:
    alone, together = batches(text(1000), rows=8), batches(text(1000), rows=8 // ranks)
    for step in range(5):
        slices = [together.batch(step, rank, ranks) for rank in range(ranks)]
        assert equal(alone.batch(step), Batch(*map(np.concatenate, zip(*slices, strict=True))))


def test_as_streams_each_row_goes_on_where_it_was() -> None:
    tokens = np.arange(10, 1010, dtype=np.uint16)
    loader = streams(tokens)
    read = [loader.batch(step) for step in range(300)]
    for before, after in pairwise(read):
        assert np.array_equal(before.targets[:, -1], after.tokens[:, 0])
    assert len({row.tobytes() for row in read[0].tokens}) == 4  # each begins at a place of its own
    first = np.concatenate([batch.tokens[0] for batch in read])[:1000]
    assert sorted(first) == tokens.tolist()  # once round the ring is the whole text


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_the_streams(ranks: int) -> None:
    alone, together = streams(text(1000), rows=8), streams(text(1000), rows=8 // ranks)
    for step in range(5):
        slices = [together.batch(step, rank, ranks) for rank in range(ranks)]
        assert equal(alone.batch(step), Batch(*map(np.concatenate, zip(*slices, strict=True))))


def test_sources_have_streams_by_their_weight() -> None:
    low, high = np.arange(10, 110, dtype=np.uint16), np.arange(1000, 1100, dtype=np.uint16)
    rows = streams(low, high, weights=(1.0, 3.0), rows=8).batch(7).tokens
    assert (rows < 500).all(axis=1).sum() == 2 and (rows > 500).all(axis=1).sum() == 6


@pytest.mark.parametrize("size", [LENGTH + 1, 83, 1000])
def test_an_epoch_reads_each_token_once(size: int) -> None:
    tokens = np.arange(10, 10 + size, dtype=np.uint16)
    windows = size // LENGTH
    loader = batches(tokens, rows=1)
    for epoch in range(3):
        seen = np.concatenate([loader.batch(epoch * windows + step).tokens[0] for step in range(windows)])
        assert len(set(seen.tolist())) == windows * LENGTH


def test_epochs_are_cut_and_ordered_anew() -> None:
    tokens = np.arange(10, 810, dtype=np.uint16)
    loader = batches(tokens, rows=100)
    first, second = loader.batch(0).tokens[:, 0], loader.batch(1).tokens[:, 0]
    assert set(first % LENGTH) != set(second % LENGTH)
    assert first.tolist() != sorted(first)
    assert not np.array_equal(np.argsort(first), np.argsort(second))


def test_targets_follow_across_the_seam() -> None:
    tokens = np.arange(10, 10 + 20, dtype=np.uint16)
    batch = batches(tokens, rows=200).batch(0)
    assert np.array_equal((batch.tokens - 10 + 1) % 20, batch.targets - 10)


def test_weights_are_kept_all_along() -> None:
    weights = (5.0, 0.1, 3.0, 1.9)
    sources = [np.full(100, 10 + number, dtype=np.uint16) for number in range(4)]
    loader = batches(*sources, weights=weights, rows=1)
    rows = [int(loader.batch(step).tokens[0, 0]) - 10 for step in range(1000)]
    for taken in (10, 100, 1000):
        counts = Counter(rows[:taken])
        assert all(abs(counts[source] - taken * weight / 10) <= 2 for source, weight in enumerate(weights))
    assert len(set(rows[:10])) >= 3


@given(st.integers(1, 300), st.integers(0, 5))
def test_a_shuffle_is_a_permutation(size: int, key: int) -> None:
    assert sorted(shuffled(index, size, (key,)) for index in range(size)) == list(range(size))


@pytest.mark.parametrize("length", [1, 3, 7, 10, 99, 100, 1000])
@pytest.mark.parametrize("limit", [None, 57])
def test_validation_counts_each_target_once(length: int, limit: int | None) -> None:
    tokens = text(100)
    expected = [int(after) for before, after in pairwise(tokens[:limit]) if before != EOS]
    found = [batch.targets for batch in validation_batches(tokens, BOS, EOS, length, rows=3, limit=limit)]
    assert [target for rows in found for target in rows.ravel().tolist() if target != IGNORED] == expected
    assert all(rows.shape[0] <= 3 and rows.shape[1] == length for rows in found)
