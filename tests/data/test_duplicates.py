"""What validates is never trained on: not a document, and not one with the text or much of the text of another."""

import random
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lmlong.data.document import Document, Skipped
from lmlong.data.duplicates import near_copies
from lmlong.data.sources import Source, open_sources
from lmlong.data.split import FEW, Part, split
from lmlong.data.text_info import text_notes
from lmlong.data.token_dataset import TokenDataset, prepare
from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.data.windows import BLOCK, MAX_WINDOWS, WINDOW, WindowSample, window_hashes
from lmlong.evaluation.perplexity import validation_text

from .conftest import TextOf, documents, sentences, text_over

FRACTION = 0.3


def of_texts(texts: list[str]) -> list[Document | Skipped]:
    return [Document.of_text(str(number), text, "strict") for number, text in enumerate(texts)]


def divided(texts: list[str], fraction: float) -> tuple[list[str], list[str]]:
    parts = [part for part in split(of_texts(texts), fraction) if isinstance(part, Part)]
    train, held_out = ([p for p in parts if p.split == name] for name in ("train", "validation"))
    return ["".join(part.pieces()) for part in train], ["".join(part.pieces()) for part in held_out]


def test_the_choice_never_changes() -> None:
    texts = [f"document {number}" for number in range(30)]
    assert divided(texts, 0.2)[1] == [f"document {number}" for number in (0, 5, 8, 9, 12, 21, 22, 29)]


def test_of_few_documents_the_end_is_held_out_at_an_exact_border() -> None:
    train, held_out = divided(["0123456789" * 10, "é" * 50], 0.05)
    assert train == ["0123456789" * 9 + "01234", "é" * 48] and held_out == ["56789", "é" * 2]
    text = "aé中😀" * 40_000
    (begin,), (end,) = divided([text], 0.5)
    assert begin + end == text and abs(len(begin.encode()) - len(text.encode()) // 2) <= 3


@pytest.mark.parametrize("count", [FEW - 1, FEW])
def test_a_fraction_of_0_or_1_gives_everything_to_one_split(count: int) -> None:
    texts = sentences(count, lines=1)
    assert divided(texts, 0.0) == (texts, []) and divided(texts, 1.0) == ([], texts)


def test_empty_documents_are_reported_and_not_counted() -> None:
    few, no_text = ["x" * 100] * (FEW - 1), Skipped("n", "no text")
    found = list(split([*of_texts(["", *few]), no_text], 0.1))
    assert [each for each in found if isinstance(each, Skipped)] == [Skipped("0", "empty"), no_text]
    assert len(found) == 2 + 2 * len(few)


def drawn(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


def cut(data: bytes, seed: int, most: int) -> list[bytes]:
    draw, pieces = random.Random(seed), []
    while data:
        size = draw.randint(1, most)
        pieces.append(data[:size])
        data = data[size:]
    return pieces


def hashes_of(*texts: list[bytes]) -> tuple[list[int], list[int]]:
    found = list(window_hashes(enumerate(texts)))
    return [int(x) for hashes, _ in found for x in hashes], [int(x) for _, numbers in found for x in numbers]


@pytest.mark.parametrize("sizes", [[BLOCK * 2 + 77], [0, 49, 50, 51, 3000, 7], [BLOCK, 60, BLOCK - WINDOW + 1, 60]])
def test_each_window_of_each_document_has_the_hash_of_its_bytes(sizes: list[int]) -> None:
    texts = [drawn(size, seed) for seed, size in enumerate(sizes)]
    hashes, numbers = hashes_of(*(cut(text, 1, 5000) for text in texts))
    places = [(number, begin) for number, size in enumerate(sizes) for begin in range(size - WINDOW + 1)]
    assert numbers == [number for number, _ in places] and len(set(hashes)) == len(hashes)
    for found, (number, begin) in list(zip(hashes, places, strict=True))[::499]:
        assert found == hashes_of([texts[number][begin : begin + WINDOW]])[0][0]


def share(windows: WindowSample, documents: int) -> list[float]:
    kept, seen = windows.counts(documents)
    return list(seen / np.maximum(kept, 1))


@pytest.mark.parametrize("most", [MAX_WINDOWS, 2000])
def test_windows_that_occur_in_other_text_are_found(most: int) -> None:
    one, two, other = drawn(20_000, 1), drawn(20_000, 2), drawn(100_000, 3)
    held = WindowSample(most)
    held.add(enumerate([cut(one, 1, 999), cut(two, 2, 999), [drawn(20_000, 4)], [b"short"]]))
    held.find([cut(other + two + other, 3, 9999), [one[:5000]]])
    found = share(held, 4)
    assert found[0] == pytest.approx(0.25, abs=0.0025 if most > 60_000 else 0.05)
    assert found[1:] == [1, 0, 0]
    kept, _ = held.counts(4)
    assert kept.sum() == 3 * (20_000 - WINDOW + 1) if most > 60_000 else 1000 < kept.sum() <= most


def test_documents_that_are_marked_are_found_in_the_others() -> None:
    text = drawn(4000, 1)
    held, without_windows = WindowSample(), WindowSample()
    without_windows.add([(0, [b"short"])])
    assert share(without_windows, 1) == [0] and share(without_windows, 0) == []
    held.add(enumerate([[text], [text[:2000] + drawn(2000, 2)]]))
    assert share(held, 2) == [0, 0]
    held.mark(np.array([True, False]))
    assert share(held, 2) == [1, pytest.approx(0.5, abs=0.02)]


def held_out(found: TokenDataset) -> list[str]:
    return documents(found.validation, found.tokenizer)


def every(found: TokenDataset) -> list[str]:
    return sorted(documents(found.train[0], found.tokenizer) + held_out(found))


def test_the_first_of_each_text_is_kept(text_of: TextOf) -> None:
    texts = sentences(30)
    kept, dropped = (text_of([*texts, *texts[3:6], "", texts[3]], duplicates=choice) for choice in ("keep", "drop"))
    found, usual = prepare(dropped), prepare(kept)
    assert every(found) == sorted(texts) and every(usual) == sorted([*texts, *texts[3:6], texts[3]])
    folder = Path(dropped.sources[0].paths[0])  # type: ignore[union-attr]
    skipped = found.info["sources"][0]["skipped"]
    assert skipped["a duplicate"] == {
        "documents": 4,
        "bytes": sum(len(texts[number].encode()) for number in (3, 4, 5, 3)),
        "names": [str(folder / f"{number:03}.txt") for number in (30, 31, 32, 34)],
    }
    assert skipped["empty"]["documents"] == 1
    # `lmlong eval --data FILE` makes token files that train on the same files, which must not lose them
    loaded: Any = SimpleNamespace(recipe=SimpleNamespace(text=dropped), tokenizer=ByteTokenizer())
    assert documents(validation_text(loaded, [folder]), ByteTokenizer()) == [*texts, *texts[3:6], texts[3]]


def test_what_is_kept_without_the_choice_has_the_key_that_it_always_had(text_of: TextOf) -> None:
    """So no corpus is tokenized again because of an option that it does not use."""
    assert prepare(text_of(sentences(3))).folder.name == "949229cf5cc0fadd257c923367b571e7"


def test_of_training_and_held_out_text_the_training_text_loses(tmp_path: Path, text_of: TextOf) -> None:
    texts = sentences(25)
    (tmp_path / "held").mkdir()
    for name, text in (("a", texts[4]), ("b", "held out alone"), ("c", texts[4])):
        (tmp_path / "held" / f"{name}.txt").write_text(text)
    held = {"sources": [{"kind": "files", "paths": [str(tmp_path / "held")]}]}
    found = prepare(text_of([*texts, texts[4]], validation=held, duplicates="drop"))
    assert held_out(found) == [texts[4], "held out alone"]
    assert documents(found.train[0], found.tokenizer) == [*texts[:4], *texts[5:]]
    counts = [{why: each["documents"] for why, each in source["skipped"].items()} for source in found.info["sources"]]
    assert counts == [{"in the validation text": 2}, {"a duplicate": 1}]


def test_a_text_of_two_sources_is_of_the_first_though_encoded_otherwise(tmp_path: Path) -> None:
    sources = []
    for name, encoding in (("one", "utf-8"), ("two", "utf-16")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("of both " * 9, encoding)
        (tmp_path / name / "b.txt").write_text(f"{name} " * 20)
        sources.append({"kind": "files", "paths": [str(tmp_path / name)]})
    found = prepare(text_over(sources=sources, duplicates="drop", validation={"fraction": 0.5}))
    assert [source["read"]["documents"] for source in found.info["sources"]] == [2, 1]
    assert found.info["sources"][1]["skipped"]["a duplicate"]["names"] == [str(tmp_path / "two" / "a.txt")]


def test_the_tokenizer_sees_each_text_once(text_of: TextOf) -> None:
    texts, subwords = sentences(30), {"vocabulary": 300}
    once = prepare(text_of(texts, tokenizer=subwords, duplicates="drop"))
    more = [*texts, *[texts[0]] * 50]
    assert prepare(text_of(more, tokenizer=subwords, duplicates="drop")).tokenizer.hash == once.tokenizer.hash
    assert prepare(text_of(more, tokenizer=subwords)).tokenizer.hash != once.tokenizer.hash


def is_chosen(text: str) -> bool:
    return int.from_bytes(sha256(text.encode()).digest()[:8], "big") < FRACTION * 2**64


def variant(text: str, chosen: bool) -> str:
    """A near-copy of a text that its hash holds out, or not."""
    copies = (f"# {number}\n{text}" for number in range(100))
    return next(copy for copy in copies if is_chosen(copy) == chosen)


def prepared(text_of: TextOf, texts: list[str], **options: Any) -> TokenDataset:
    return prepare(text_of(texts, validation={"fraction": FRACTION}, **options))


TEXTS = sentences(60)
CHOSEN = [text for text in TEXTS if is_chosen(text)]


def test_a_near_copy_of_training_text_is_not_held_out(text_of: TextOf) -> None:
    assert held_out(prepared(text_of, TEXTS)) == CHOSEN and len(CHOSEN) > 10
    texts = [*TEXTS, variant(CHOSEN[3], False)]
    found = prepared(text_of, texts)
    assert held_out(found) == [*CHOSEN[:3], *CHOSEN[4:]] and every(found) == sorted(texts)
    near = found.info["sources"][0]["near_copies"]
    assert (near["documents"], near["bytes"]) == (1, len(CHOSEN[3].encode()))
    assert [Path(name).name for name in near["names"]] == [f"{texts.index(CHOSEN[3]):03}.txt"]
    assert found.info["overlap"]["in_training_text"] == 0 < found.info["overlap"]["windows"]


def test_a_near_copy_of_a_near_copy_is_not_held_out_either(text_of: TextOf) -> None:
    first, second, *rest = CHOSEN
    # the first is half of training text; a fourth text is like the first where it is like nothing else
    trained = next(text for text in TEXTS if not is_chosen(text))
    one = variant(trained[:1000] + first[:1500], True)
    other = variant(first[:1500] + second[len(second) // 2 :], True)
    texts = [text for text in TEXTS if text not in (first, second)]
    assert held_out(prepared(text_of, [*texts, other])) == [*rest, other]
    assert held_out(prepared(text_of, [*texts, one, other])) == rest


def test_the_tokenizer_is_trained_on_what_is_trained_on(text_of: TextOf) -> None:
    near = [variant(CHOSEN[0] + "secret" * 400, False), CHOSEN[0] + "secret" * 400]
    tokenizer = prepared(text_of, [*TEXTS, *near], tokenizer={"vocabulary": 300}).tokenizer
    assert any("secret" in tokenizer.decode([token]) for token in range(300))


def test_text_of_one_template_is_held_out_as_usual_and_the_overlap_reported(text_of: TextOf) -> None:
    texts = [f"{number} the same service answered the same request in time, and went on\n" * 3 for number in range(60)]
    found = prepared(text_of, texts)
    assert held_out(found) == [text for text in texts if is_chosen(text)]
    share = found.info["overlap"]["share"]
    assert share > 0.3
    note = f"{share:.1%} of the 50-byte windows of the held-out text occur in the training text"
    assert list(text_notes(found.info)) == [note]


def test_validation_sources_stay_unchanged_and_the_overlap_is_reported(tmp_path: Path, text_of: TextOf) -> None:
    (tmp_path / "held.txt").write_text(TEXTS[4] + TEXTS[30])
    validation = {"sources": [{"kind": "files", "paths": [str(tmp_path / "held.txt")]}]}
    found = prepare(text_of(TEXTS[:30], validation=validation))
    assert held_out(found) == [TEXTS[4] + TEXTS[30]]
    assert found.info["overlap"]["share"] == pytest.approx(0.5, abs=0.05)


def test_near_copies_are_searched_once_and_never_in_a_remote_source(text_of: TextOf) -> None:
    (source,) = open_sources(text_of([*TEXTS, variant(CHOSEN[0], False)], validation={"fraction": FRACTION}))
    first = near_copies([source], "keep")
    assert first == {sha256(CHOSEN[0].encode()).digest()[:16]}

    def unread() -> Any:
        raise AssertionError("read again")

    assert near_copies([source._replace(documents=unread)], "keep") == first
    remote = Source("hub", "a", None, True, unread, held_out=FRACTION)
    assert near_copies([remote], "keep") == frozenset()
