"""The rows of the recall experiment: what they tell, what they ask, and how answers are counted."""

import pytest
import torch
from torch import Tensor

from lmlong.experiments.recall_model import FILLER, RecallBatch, RecallScore, keys, make_batch, score_answers, values
from lmlong.model.loss import IGNORED

SHAPES = [(1, 4, 4), (4, 16, 64), (4, 50, 12), (16, 64, 64), (31, 124, 64)]


def told(row: Tensor, pairs: int) -> dict[int, int]:
    """What each key of a row was paired with."""
    return dict(row[: 2 * pairs].view(pairs, 2).tolist())


def looked_up(questions: RecallBatch, pairs: int) -> Tensor:
    """The answers of one who remembers everything."""
    memories = [told(row, pairs) for row in questions.tokens]
    rows = zip(memories, questions.tokens.tolist(), strict=True)
    return torch.tensor([[memory.get(token, FILLER) for token in row] for memory, row in rows])


@pytest.mark.parametrize(("pairs", "length", "vocabulary"), SHAPES)
def test_every_key_is_told_once_and_asked_once(pairs: int, length: int, vocabulary: int) -> None:
    questions = make_batch(20, pairs, length, vocabulary, seed=0, step=0)
    assert questions.tokens.shape == questions.targets.shape == (20, length)
    for tokens, targets in zip(questions.tokens, questions.targets, strict=True):
        memory = told(tokens, pairs)
        assert len(memory) == len(set(memory.values())) == pairs
        assert set(memory) <= set(keys(vocabulary)) and set(memory.values()) <= set(values(vocabulary))
        asked = targets != IGNORED
        assert not asked[: 2 * pairs].any()
        assert sorted(tokens[asked].tolist()) == sorted(memory)
        assert [memory[key] for key in tokens[asked].tolist()] == targets[asked].tolist()
        assert (tokens[2 * pairs :][~asked[2 * pairs :]] == FILLER).all()
        assert not (asked[1:] & asked[:-1]).any()  # what follows a query is a filler


@pytest.mark.parametrize("vocabulary", [4, 12, 64])
def test_keys_values_and_filler_share_no_token(vocabulary: int) -> None:
    assert sorted([FILLER, *keys(vocabulary), *values(vocabulary)]) == list(range(vocabulary))


def test_rows_are_a_function_of_seed_and_step() -> None:
    first = make_batch(8, 4, 16, 64, seed=3, step=5)
    torch.manual_seed(99)
    assert all(torch.equal(a, b) for a, b in zip(first, make_batch(8, 4, 16, 64, seed=3, step=5), strict=True))
    others = [make_batch(8, 4, 16, 64, seed, step) for seed, step in ((3, 6), (4, 5), (5, 3))]
    assert not any(torch.equal(first.tokens, other.tokens) for other in others)
    assert len({tuple(row) for row in first.tokens.tolist()}) == 8


def test_keys_and_values_are_drawn_evenly() -> None:
    tokens = make_batch(4000, 4, 16, 64, seed=0, step=0).tokens
    for place, drawn in ((0, keys(64)), (6, keys(64)), (1, values(64)), (7, values(64))):
        counts = tokens[:, place].bincount(minlength=64)[list(drawn)]
        assert counts.sum() == 4000
        assert counts.min() > 80 and counts.max() < 180  # 125 or 129 are expected, with a deviation of 11


def test_queries_are_as_rare_as_they_are_far() -> None:
    places = (make_batch(20_000, 1, 66, 64, seed=0, step=0).targets != IGNORED).sum(0)[2::2].double()
    weights = torch.arange(1, 33, dtype=torch.float64) ** -0.99
    expected = 20_000 * weights / weights.sum()
    assert ((places - expected).abs() < 5 * expected.sqrt()).all()


def test_who_looks_up_is_always_right() -> None:
    for pairs in (1, 4, 16):
        questions = make_batch(50, pairs, 70, 64, seed=0, step=0)
        assert score_answers(looked_up(questions, pairs), questions.targets) == RecallScore(50 * pairs, 50 * pairs)
        assert score_answers(looked_up(questions, pairs), questions.targets).accuracy == 1.0


def test_who_guesses_is_right_by_chance() -> None:
    questions = make_batch(2000, 8, 32, 64, seed=0, step=0)
    guesses = torch.randint(32, 64, questions.tokens.shape, generator=torch.Generator().manual_seed(0))
    assert score_answers(guesses, questions.targets).accuracy == pytest.approx(1 / 32, abs=0.005)
    first_told = questions.tokens[:, 1:2].expand_as(questions.tokens)
    assert score_answers(first_told, questions.targets) == RecallScore(2000, 16_000)


def test_only_answers_to_questions_count() -> None:
    targets = torch.tensor([[IGNORED, 7, IGNORED, 9], [IGNORED, IGNORED, 8, IGNORED]])
    answers = torch.tensor([[IGNORED, 7, 5, 8], [1, 1, 8, IGNORED]])
    assert score_answers(answers, targets) == RecallScore(2, 3)
    assert RecallScore(2, 3) + RecallScore(1, 5) == RecallScore(3, 8)
