"""A batch follows from its number; epochs cover the text; validation counts every token once."""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np
import pytest
from grids import thinned
from hypothesis import given
from hypothesis import strategies as st

from lmlong import recipe
from lmlong.data.batches import (
    VALIDATION_STREAMS,
    Arrays,
    CausalBatch,
    TrainingBatches,
    scored_tokens,
    streams_of_each,
    validation_batches,
    validation_streams,
)
from lmlong.data.masking import MaskedBatches, Masker
from lmlong.data.rows import IGNORED, CyclicTokens, Documents, Streams, Windows, pack
from lmlong.data.shuffle import FEW, shuffled
from lmlong.data.tokenizers.base import ByteTokenizer

BOS, EOS = 1, 2
LENGTH = 8


def text(size: int, first: int = 10) -> np.ndarray:
    """Distinct tokens, as documents of ten."""
    tokens = np.arange(first, first + size, dtype=np.uint16)
    tokens[::10], tokens[9::10] = BOS, EOS
    return tokens


def cyclic(tokens: np.ndarray, factor: int = 1) -> CyclicTokens:
    return CyclicTokens(tokens, np.flatnonzero(tokens == BOS), BOS, EOS, factor)


def batches(
    *sources: np.ndarray, weights: tuple[float, ...] = (1.0,), rows: int = 4, seed: int = 0, short_rows: int = 0
) -> TrainingBatches:
    cut = [Windows(cyclic(tokens), LENGTH, (seed, number)) for number, tokens in enumerate(sources)]
    return TrainingBatches(cut, weights, EOS, rows, short_rows=short_rows)


def streams(
    *sources: np.ndarray, weights: tuple[float, ...] = (1.0,), rows: int = 4, ranks: int = 1, seed: int = 0
) -> TrainingBatches:
    each = streams_of_each(weights, rows * ranks)
    cut = [Streams(cyclic(tokens), LENGTH, (seed, number), each[number]) for number, tokens in enumerate(sources)]
    return TrainingBatches(cut, weights, EOS, rows, streams=True)


def documents(sizes: list[int], length: int, group: int = 1, factor: int = 1, seed: int = 0) -> Documents:
    """Rows of documents with these numbers of distinct tokens, bos and eos included."""
    tokens = np.concatenate(
        [np.array([BOS, *range(10 + 1000 * n, 8 + 1000 * n + size), EOS]) for n, size in enumerate(sizes)]
    )
    return Documents(cyclic(tokens.astype(np.uint32), factor), length, (seed,), group)


def equal(first: Arrays, second: Arrays) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))


def test_targets_and_starts() -> None:
    tokens = np.array([1, 7, 8, 2, 1, 9, 2], dtype=np.uint16)
    (batch,) = validation_batches(scored_tokens(tokens, BOS, EOS), length=8, rows=4)
    assert batch.tokens.tolist() == [[1, 7, 8, 2, 1, 9]]
    assert batch.targets.tolist() == [[7, 8, 2, IGNORED, 9, 2]]
    assert batch.document_starts.tolist() == [[True, False, False, False, True, False]]
    assert [array.dtype for array in batch] == [np.int64, np.int64, np.bool_]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 9), st.sampled_from([1, 2, 4]))
def test_one_token_may_begin_and_end_documents(sizes: list[int], length: int, factor: int) -> None:
    """Targets and starts are those of a text with two different tokens, however it is cut."""
    words = np.arange(100, 200)
    tokens = np.concatenate([np.array([BOS, *words[:size], EOS]) for size in sizes])
    alike = np.where(tokens == EOS, BOS, tokens)
    starts = np.flatnonzero(tokens == BOS)
    pairs: list[tuple[Iterable[CausalBatch], Iterable[CausalBatch]]] = [
        (
            validation_batches(scored_tokens(tokens, BOS, EOS, factor), length * factor, rows=2),
            validation_batches(scored_tokens(alike, BOS, BOS, factor), length * factor, rows=2),
        )
    ]
    for kind in (Windows, lambda *cut: Documents(*cut, group=1)):
        texts = CyclicTokens(tokens, starts, BOS, EOS, factor), CyclicTokens(alike, starts, BOS, BOS, factor)
        if len(texts[0]) >= length * factor:
            two, one = (TrainingBatches([kind(each, length * factor, (0, 1))], [1.0], each.eos, 2) for each in texts)
            pairs.append(([two.batch(0)], [one.batch(0)]))
    for two_tokens, one_token in pairs:
        for two, one in zip(two_tokens, one_token, strict=True):
            assert np.array_equal(np.where(two.tokens == EOS, BOS, two.tokens), one.tokens)
            assert np.array_equal(np.where(two.targets == EOS, BOS, two.targets), one.targets)
            assert np.array_equal(two.document_starts, one.document_starts)


def masked(rows: int, ranks: int = 1, seed: int = 0) -> MaskedBatches:
    windows = Windows(cyclic(text(1000)), LENGTH, (seed, 0))
    return MaskedBatches([windows], [1.0], Masker(recipe.Masking(), ByteTokenizer()), rows, seed)


UNEQUAL = [int(size) for size in np.random.default_rng(0).integers(3, 900, 200)]
ORDERS: dict[str, Callable[..., TrainingBatches]] = {
    "windows": lambda rows, ranks=1, seed=0: batches(text(1000), rows=rows, seed=seed),
    "streams": lambda rows, ranks=1, seed=0: streams(text(1000), rows=rows, ranks=ranks, seed=seed),
    "documents": lambda rows, ranks=1, seed=0: TrainingBatches(
        [documents(UNEQUAL, 1000, group=8, seed=seed)], [1.0], EOS, rows
    ),
    "masked": masked,
    "short": lambda rows, ranks=1, seed=0: batches(text(1000), rows=rows, seed=seed, short_rows=16),
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("order", ORDERS)
def test_a_batch_follows_from_its_number_and_is_shared_out_among_ranks(order: str, ranks: int) -> None:
    make = ORDERS[order]
    alone, again, together, other = make(8), make(8), make(8 // ranks, ranks), make(8, seed=1)
    for step in (*range(6), 500, 10**9):
        batch = alone.batch(step)
        slices = [together.batch(step, rank, ranks) for rank in range(ranks)]
        assert equal(batch, again.batch(step))
        assert equal(batch, tuple(map(np.concatenate, zip(*slices, strict=True))))
    assert not equal(alone.batch(0), alone.batch(1))
    assert not all(equal(alone.batch(step), other.batch(step)) for step in range(6))


def is_padded(batch: CausalBatch, factor: int) -> bool:
    """Return whether documents begin at multiples of a factor, and the padding before them is never a target."""
    assert all(start % factor == 0 for _, start in np.argwhere(batch.document_starts))
    after_the_end = (batch.tokens[:, 1:] == EOS) & (batch.tokens[:, :-1] == EOS)
    return bool((batch.targets[:, 1:][after_the_end] == IGNORED).all())


def words_read(read: list[CausalBatch], tokens: np.ndarray, factor: int) -> int:
    """Return how many tokens are in batches, ends of documents aside: each once, and its target is the next one."""
    assert all(is_padded(batch, factor) for batch in read)
    next_to = dict(pairwise([*tokens.tolist(), int(tokens[0])]))
    every = [(batch.tokens.ravel().tolist(), batch.targets.ravel().tolist()) for batch in read]
    pairs = [(token, target) for each in every for token, target in zip(*each, strict=True) if token not in (BOS, EOS)]
    assert all(target == next_to[token] for token, target in pairs)
    assert len({token for token, _ in pairs}) == len(pairs)
    return len(pairs)


def assert_continued(batches: list[CausalBatch]) -> None:
    """Check that each row begins with the last target of the same row of the batch before, if there is one."""
    for before, after in pairwise(batches):
        continues = ~after.document_starts[:, 0] & (before.targets[:, -1] != IGNORED) & (after.targets[:, 0] != IGNORED)
        assert np.array_equal(before.targets[continues, -1], after.tokens[continues, 0])


@pytest.mark.parametrize("factor", [1, 8])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_streams_continue_and_read_all_of_a_text_before_any_of_it_again(rows: int, factor: int) -> None:
    tokens = text(1200)
    source = Streams(cyclic(tokens, factor), 24, (0, 0), rows)
    loader, epoch = TrainingBatches([source], [1.0], EOS, rows, streams=True), len(source.text)
    read = [loader.batch(step) for step in range(epoch // 24 // rows)]
    assert_continued(read)
    assert words_read(read, tokens, factor) > 960 - rows * 24


@pytest.mark.parametrize(("size", "factor"), [(LENGTH + 1, 1), (20, 1), (83, 1), (1000, 1), (1000, 3), (1000, 8)])
def test_each_epoch_of_windows_reads_each_token_once_across_the_seam(size: int, factor: int) -> None:
    tokens = np.arange(10, 10 + size) if factor == 1 else text(size)
    ring, length = cyclic(tokens, factor), LENGTH if factor == 1 else 24
    assert len(ring) == size if factor == 1 else size // 10 * -(-10 // factor) * factor
    loader, windows = TrainingBatches([Windows(ring, length, (0, 0))], [1.0], EOS, 1), len(ring) // length
    for epoch in range(3):
        read = [loader.batch(epoch * windows + number) for number in range(windows)]
        left_out = len(ring) % length  # an epoch ends where no window fits any more
        assert words_read(read, tokens, factor) >= len(set(tokens.tolist()) - {BOS, EOS}) - left_out


def test_short_steps_read_the_parts_of_the_same_rows_each_once() -> None:
    tokens, steps = text(1000), 5
    whole, short = batches(tokens, weights=(1.0,)), batches(tokens, short_rows=steps * 4)
    rows = [row for step in range(steps) for row in zip(*whole.batch(step), strict=True)]
    read = [short.batch(step) for step in range(steps)]
    assert {batch.tokens.shape for batch in read} == {(16, LENGTH // 4)}
    parts = [part for batch in read for part in zip(*batch, strict=True)]
    for number, row in enumerate(rows):  # the first parts of all rows come first
        assert equal(row, tuple(map(np.concatenate, zip(*parts[number :: len(rows)], strict=True))))
    assert equal(short.batch(steps), whole.batch(steps))


def test_epochs_are_cut_and_ordered_anew() -> None:
    tokens = np.arange(10, 810, dtype=np.uint16)
    loader = batches(tokens, rows=100)
    first, second = loader.batch(0).tokens[:, 0], loader.batch(1).tokens[:, 0]
    assert set(first % LENGTH) != set(second % LENGTH)
    assert first.tolist() != sorted(first)
    assert not np.array_equal(np.argsort(first), np.argsort(second))
    of_one_length = TrainingBatches([documents([8] * 40, 8)], [1.0], EOS, 40)
    first, second = of_one_length.batch(0).tokens[:, 1], of_one_length.batch(1).tokens[:, 1]
    assert sorted(first) == sorted(second) and first.tolist() != second.tolist()


def test_weights_are_kept_all_along() -> None:
    weights = (5.0, 0.1, 3.0, 1.9)
    sources = [np.full(100, 10 + number, dtype=np.uint16) for number in range(4)]
    loader = batches(*sources, weights=weights, rows=1)
    rows = [int(loader.batch(step).tokens[0, 0]) - 10 for step in range(1000)]
    for taken in (10, 100, 1000):
        counts = Counter(rows[:taken])
        assert all(abs(counts[source] - taken * weight / 10) <= 2 for source, weight in enumerate(weights))
    assert len(set(rows[:10])) >= 3
    of_streams = streams(*sources[:2], weights=(1.0, 3.0), rows=8).batch(7).tokens
    assert (of_streams == 10).all(axis=1).sum() == 2 and (of_streams == 11).all(axis=1).sum() == 6


@thinned(
    pytest.mark.parametrize(
        ("factor", "length"), [(1, 1), (1, 7), (1, 10), (1, 1000), (2, 24), (3, 24), (8, 48), (8, 240)]
    ),
    pytest.mark.parametrize("size", [1, 2, 9, 11, 57, 100]),
)
def test_validation_counts_each_target_once(factor: int, length: int, size: int) -> None:
    tokens = scored_tokens(text(100)[:size], BOS, EOS, factor)
    found = list(validation_batches(tokens, length, rows=3))
    assert all(is_padded(batch, factor) for batch in found)
    assert all(len(batch.tokens) <= 3 and batch.tokens.shape[1] == min(length, len(tokens)) for batch in found)
    assert scored(batch.targets for batch in found) == targets(text(100)[:size])
    for ranks in (2, 3):
        shared = list(validation_batches(tokens, length, rows=3, ranks=ranks))
        assert len(shared) % ranks == 0 and len(shared) - len(found) < ranks
        assert all(equal(one, other) for one, other in zip(shared, found, strict=False))
        assert all((batch.targets == IGNORED).all() for batch in shared[len(found) :])
        assert len({batch.tokens.shape[1] for batch in shared}) <= 1


@pytest.mark.parametrize(
    ("length", "limit", "windows"), [(10, 57, 5), (10, 100, 10), (7, 3, 1), (50, 60, 1), (10, 20, 2)]
)
def test_a_limited_validation_scores_windows_from_all_over_the_text(length: int, limit: int, windows: int) -> None:
    tokens = np.arange(10, 1010, dtype=np.uint16)
    found = list(validation_batches(scored_tokens(tokens, BOS, EOS), length, rows=3, limit=limit))
    begins = [int(row[0]) - 10 for batch in found for row in batch.tokens]
    assert len(begins) == windows and sum(batch.tokens.size for batch in found) <= limit
    assert len({begin // (1000 // windows) for begin in begins}) == windows, "one in each part of the text"
    assert all(batch.tokens.shape[1] == min(length, limit) for batch in found)


@thinned(
    pytest.mark.parametrize("factor", [1, 3, 8]),
    pytest.mark.parametrize("limit", [None, 1, 100]),
    pytest.mark.parametrize(("rows", "ranks"), [(1, 1), (3, 2), (20, 3)]),
)
def test_validation_streams_continue_from_batch_to_batch(factor: int, limit: int | None, rows: int, ranks: int) -> None:
    tokens = text(1000)

    def batches_of(rank: int) -> list[CausalBatch]:
        return list(validation_streams(scored_tokens(tokens, BOS, EOS, factor), 24, rows, limit, rank, ranks))

    found = [batches_of(rank) for rank in range(ranks)]
    assert len({len(of_rank) for of_rank in found}) == 1
    assert {len(batch.tokens) for of_rank in found for batch in of_rank} == {min(rows, VALIDATION_STREAMS)}
    every = sorted(scored(batch.targets for of_rank in found for batch in of_rank))
    if limit is None:
        assert every == sorted(targets(tokens))
    else:
        assert set(every) < set(targets(tokens)) and len(every) <= max(limit, VALIDATION_STREAMS * factor)
    assert_continued(found[0])
    assert found[0][0].document_starts[:, 0].all(), "each part begins with an empty state"


def scored(batches: Iterable[np.ndarray]) -> list[int]:
    return [target for rows in batches for target in rows.ravel().tolist() if target != IGNORED]


def targets(tokens: np.ndarray) -> list[int]:
    return [int(after) for before, after in pairwise(tokens) if before != EOS]


SIZES = st.lists(st.integers(3, 60), min_size=1, max_size=60)


@given(SIZES, st.integers(8, 24), st.sampled_from([1, 2, 3, 8]))
def test_an_epoch_of_documents_reads_each_whole_and_once(sizes: list[int], blocks: int, factor: int) -> None:
    length = blocks * factor
    rows, seen = documents(sizes, length, factor=factor), Counter[tuple[int, ...]]()
    whole = np.split(rows.text.tokens, rows.text.begins[1:])
    expected = Counter(tuple(text[begin : begin + length]) for text in whole for begin in range(0, len(text), length))
    loader = TrainingBatches([rows], [1.0], EOS, 1)
    read = [loader.batch(number) for number in range(len(rows.packed))]
    assert words_read(read, rows.text.tokens, factor) == sum(sizes) - 2 * len(sizes)
    for batch in read:
        assert batch.tokens.shape[1] % factor == 0
        tokens, targets, starts = (array[0] for array in batch)
        borders = np.flatnonzero(starts)
        assert borders[0] == 0 and len(tokens) <= length
        for piece, after in zip(np.split(tokens, borders[1:]), np.split(targets, borders[1:]), strict=True):
            end = piece.tolist().index(EOS) + 1 if EOS in piece else len(piece)
            assert (piece[end:] == EOS).all() and (after[piece == EOS] == IGNORED).all()  # padding
            seen[tuple(piece[:end].tolist())] += 1
    assert seen == expected


@given(SIZES, st.integers(60, 200))
def test_rows_of_documents_are_well_filled(sizes: list[int], length: int) -> None:
    rows = pack(np.array(sizes), length)
    assert sorted(np.concatenate(rows).tolist()) == list(range(len(sizes)))
    assert all(sum(sizes[piece] for piece in row) <= length for row in rows)
    assert len(rows) <= 11 / 9 * -(-sum(sizes) // length) * 1.5 + 1
    filled = sorted(sum(sizes[piece] for piece in row) for row in rows)
    assert len(filled) == 1 or filled[0] + filled[1] > length  # the emptiest two would not fit together


def test_rows_of_one_step_are_about_as_full_though_documents_are_unequal() -> None:
    rows = documents(UNEQUAL, 1000, group=8)
    loader, unfilled = TrainingBatches([rows], [1.0], EOS, 8), []
    for step in range(len(rows.packed) // 8):
        filled = [rows.filled(8 * step + row) for row in range(8)]
        unfilled.append(1 - min(filled) / loader.batch(step).tokens.shape[1])
    assert np.median(unfilled) < 0.07


@pytest.mark.parametrize("size", [1, 2, 5, FEW, FEW + 1, 100, 1000])
def test_an_order_has_each_element_once(size: int) -> None:
    assert sorted(shuffled(index, size, (1, 2)) for index in range(size)) == list(range(size))


@pytest.mark.parametrize("size", [5, FEW + 1])
def test_each_element_is_anywhere_and_after_any_other_equally_often(size: int) -> None:
    """By chi-square, with more draws than it takes to see a share that is off by a tenth."""
    draws = 1500
    orders = np.array([[shuffled(index, size, (seed,)) for index in range(size)] for seed in range(draws)])
    at = np.array([np.bincount(orders[:, index], minlength=size) for index in range(size)])
    _assert_uniform(at, freedom=(size - 1) ** 2)
    pairs = np.bincount((orders[:, :-1] * size + orders[:, 1:]).ravel(), minlength=size**2).reshape(size, size)
    _assert_uniform(pairs[~np.eye(size, dtype=bool)], freedom=size * (size - 1) - 1)


def _assert_uniform(counts: np.ndarray, freedom: int) -> None:
    chi_square = float(((counts - counts.mean()) ** 2).sum() / counts.mean())
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5
