"""Tokens are masked in the share and the way that the recipe sets, as a pure function of a key and a position."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from lmlong import recipe
from lmlong.data.masking import MaskedBatch, MaskedBatches, Masker, ValidationPieces
from lmlong.data.rows import IGNORED, CyclicTokens, Documents
from lmlong.data.token_file import TokenFile
from lmlong.data.tokenizers import train_tokenizer
from lmlong.data.tokenizers.base import Tokenizer

BYTES = train_tokenizer([], recipe.Tokenizer(kind="bytes"))
BOS, EOS, MASK = BYTES.bos, BYTES.eos, BYTES.vocabulary
LENGTH = 16


def masker(kind: str = "bert", share: float = 0.15, tokenizer: Tokenizer = BYTES) -> Masker:
    return Masker(recipe.Masking(kind=kind, share=share), tokenizer)  # type: ignore[arg-type]


def text(*sizes: int) -> TokenFile:
    """Documents of these sizes in tokens, bos and eos included."""
    draw = np.random.default_rng(0)
    tokens = np.concatenate([np.array([BOS, *draw.integers(256, size=size - 2), EOS]) for size in sizes])
    return TokenFile(tokens.astype(np.uint16), np.flatnonzero(tokens == BOS))


def unmasked(batch: MaskedBatch) -> Iterator[list[int]]:
    """Yield the tokens of each row before masking."""
    whole = np.where(batch.targets == IGNORED, batch.tokens, batch.targets)
    return (row[~padding].tolist() for row, padding in zip(whole, batch.padding, strict=True))


@pytest.mark.parametrize("share", [0.15, 0.4])
def test_shares_of_bert(share: float) -> None:
    """Of 200,000 tokens; bounds of five standard deviations, so that one test in a million fails by chance."""
    tokens = np.random.default_rng(1).integers(256, size=200_000)
    hidden = masker(share=share).mask_row(tokens, (7,))
    chosen = hidden.targets != IGNORED
    assert np.array_equal(hidden.targets[chosen], tokens[chosen])
    assert np.array_equal(hidden.tokens[~chosen], tokens[~chosen])

    def near(found: float, wanted: float, count: int) -> bool:
        return abs(found - wanted) < 5 * (wanted * (1 - wanted) / count) ** 0.5

    many = int(chosen.sum())
    seen, truth = hidden.tokens[chosen], hidden.targets[chosen]
    assert near(chosen.mean(), share, len(tokens))
    assert near((seen == MASK).mean(), 0.8, many)
    random = (seen != MASK) & (seen != truth)
    assert near(random.mean(), 0.1 * 255 / 256, many)  # a random token is now and then the true one
    assert near((seen == truth).mean(), 0.1 + 0.1 / 256, many)
    assert np.bincount(seen[random], minlength=256).min() > 0, "every byte is drawn, and only bytes"
    assert seen[seen != MASK].max() < 256


def test_all_is_a_mask_in_the_plain_kind() -> None:
    hidden, usual = (masker(kind).mask_row(np.arange(200), (7,)) for kind in ("plain", "bert"))
    assert np.array_equal(hidden.tokens == MASK, hidden.targets != IGNORED)
    assert np.array_equal(hidden.targets, usual.targets)


def test_ends_of_documents_are_neither_hidden_nor_shown_for_others() -> None:
    tokens = np.array([BOS, 1, 2, EOS] * 500)
    hidden = masker(share=0.99).mask_row(tokens, (7,))
    ends = (tokens == BOS) | (tokens == EOS)
    assert (hidden.targets[ends] == IGNORED).all() and np.array_equal(hidden.tokens[ends], tokens[ends])
    assert not np.isin(hidden.tokens[~ends], [BOS, EOS]).any()


def test_a_row_with_a_token_has_a_target() -> None:
    for key in range(200):
        hidden = masker(share=1e-6).mask_row(np.array([BOS, 5, 6, 7, EOS]), (key,))
        assert (hidden.targets != IGNORED).sum() == 1
    assert (masker().mask_row(np.array([EOS]), (0,)).targets == IGNORED).all()


def test_masks_depend_only_on_key_and_position() -> None:
    tokens = np.random.default_rng(2).integers(256, size=5000)
    whole = masker().mask_row(tokens, (3, 4))
    for begin, end in [(0, 100), (1, 5000), (2500, 2600), (4999, 5000)]:
        part = masker().mask_row(tokens[begin:end], (3, 4), begin)
        if end - begin > 1:  # of a single token the one that must be
            assert np.array_equal(part.tokens, whole.tokens[begin:end])
            assert np.array_equal(part.targets, whole.targets[begin:end])
    assert not np.array_equal(whole.targets, masker().mask_row(tokens, (3, 5)).targets)


def test_draws_are_those_of_every_machine() -> None:
    tokens, targets = masker(share=0.5).mask_row(np.arange(12), (1, 2))
    assert np.flatnonzero(targets != IGNORED).tolist() == [0, 3, 4, 5, 6, 7, 8, 10]
    assert tokens.tolist() == [MASK, 1, 2, 3, MASK, MASK, 6, MASK, MASK, 9, MASK, 11]


def test_documents_stand_alone_each_in_its_row() -> None:
    file = text(40, 5, LENGTH + 1, 9)  # the third leaves an end without text, which is not read
    rows = Documents(CyclicTokens(file.tokens, file.starts, BOS, EOS), LENGTH, (0, 0), 1, packed=False)
    made = MaskedBatches([rows], [1.0], masker(), 1, 0)
    found = [next(unmasked(made.batch(number))) for number in range(6)]
    ends = [*file.starts[1:], len(file.tokens)]
    pieces = [file.tokens[b:e].tolist() for b, e in zip(file.starts, ends, strict=True)]
    wanted = [piece[at : at + LENGTH] for piece in pieces for at in range(0, len(piece), LENGTH)]
    assert sorted(found) == sorted(piece for piece in wanted if piece != [EOS])


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("rows", "ranks"), [(2, 1), (3, 2), (50, 3)])
def test_validation_reads_every_token_once_and_hides_the_same_at_every_length(
    whole: bool, rows: int, ranks: int
) -> None:
    file = text(40, 5, 33, 300)

    def found(length: int) -> tuple[list[int], Counter[int]]:
        made = list(ValidationPieces.of(file, length, whole).batches(file.tokens, masker(), rows, ranks))
        assert len(made) % ranks == 0
        assert all((batch.targets[batch.padding] == IGNORED).all() for batch in made)
        tokens = sorted(token for batch in made for row in unmasked(batch) for token in row)
        return tokens, Counter(int(t) for batch in made for t in batch.targets[batch.targets != IGNORED])

    (tokens, short), (again, long) = found(LENGTH), found(1000)
    assert tokens == again == sorted(file.tokens.tolist())
    assert not long - short, "short rows hide what long ones hide, and more only where there would be nothing"
    assert 0.05 * 370 < long.total() <= short.total() < 0.3 * 370


@pytest.mark.parametrize("whole", [False, True])
def test_a_limited_validation_reads_pieces_from_all_over_the_text(whole: bool) -> None:
    file = text(*[20] * 50)
    pieces = ValidationPieces.of(file, 10, whole, limit=100)
    assert (pieces.ends - pieces.begins).tolist() == [10] * 10
    assert sorted(begin // 100 for begin in pieces.begins.tolist()) == list(range(10))
