"""What validates is never trained on, stays the same when the corpus grows, and together nothing is lost."""

import pytest

from lmlong.data.document import Document, Skipped
from lmlong.data.split import FEW, Part, split

from .conftest import sentences


def documents(texts: list[str]) -> list[Document | Skipped]:
    return [Document.of_text(str(number), text, "strict") for number, text in enumerate(texts)]


def divided(texts: list[str], fraction: float) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"train": [], "validation": []}
    for part in split(documents(texts), fraction):
        assert isinstance(part, Part)
        found[part.split].append("".join(part.pieces()))
    return found


def test_documents_go_whole_to_one_split() -> None:
    texts = sentences(400, lines=1)
    found = divided(texts, 0.25)
    assert sorted(found["train"] + found["validation"]) == sorted(texts)
    assert 70 < len(found["validation"]) < 130


def test_a_further_document_moves_no_other() -> None:
    texts = sentences(41, lines=1)
    before, after = divided(texts[:40], 0.3), divided([texts[40], *texts[:40]], 0.3)
    for name in ("train", "validation"):
        assert [text for text in after[name] if text != texts[40]] == before[name]


def test_the_choice_never_changes() -> None:
    found = divided([f"document {number}" for number in range(30)], 0.2)
    assert found["validation"] == [f"document {number}" for number in (0, 5, 8, 9, 12, 21, 22, 29)]


def test_of_few_documents_the_end_is_held_out() -> None:
    found = divided(["0123456789" * 10, "é" * 50], 0.05)
    assert found["train"] == ["0123456789" * 9 + "01234", "é" * 48]
    assert found["validation"] == ["56789", "é" * 2]


def test_the_border_of_a_long_document_is_exact() -> None:
    text = "aé中😀" * 40_000
    found = divided([text], 0.5)
    assert found["train"][0] + found["validation"][0] == text
    assert abs(len(found["train"][0].encode()) - len(text.encode()) // 2) <= 3


@pytest.mark.parametrize("count", [FEW - 1, FEW])
def test_a_fraction_of_0_or_1_gives_everything_to_one_split(count: int) -> None:
    texts = sentences(count, lines=1)
    assert divided(texts, 0.0) == {"train": texts, "validation": []}
    assert divided(texts, 1.0) == {"train": [], "validation": texts}


def test_empty_documents_are_reported_and_not_counted() -> None:
    texts = ["x" * 100] * (FEW - 1)
    entries = list(split([*documents(["", *texts]), Skipped("n", "no text")], 0.1))
    assert [entry for entry in entries if isinstance(entry, Skipped)] == [
        Skipped("0", "empty"),
        Skipped("n", "no text"),
    ]
    assert len(entries) == 2 + 2 * len(texts)
