"""A near-copy of training text is never held out, and what is left of the overlap is reported."""

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from lmlong import recipe
from lmlong.data.duplicates import near_copies
from lmlong.data.sources import Source, open_sources
from lmlong.data.text_info import text_notes
from lmlong.data.token_dataset import TokenDataset, prepare
from lmlong.data.tokenizers.base import ByteTokenizer

from .conftest import sentences
from .test_tokens import documents

TextOf = Callable[..., recipe.Text]
FRACTION = 0.3


def is_chosen(text: str) -> bool:
    return int.from_bytes(sha256(text.encode()).digest()[:8], "big") < FRACTION * 2**64


def variant(text: str, chosen: bool) -> str:
    """A near-copy of a text that its hash holds out, or not."""
    copies = (f"# {number}\n{text}" for number in range(100))
    return next(copy for copy in copies if is_chosen(copy) == chosen)


def held_out(found: TokenDataset) -> list[str]:
    return documents(found.validation, ByteTokenizer())


def prepared(text_of: TextOf, texts: list[str], **options: Any) -> TokenDataset:
    return prepare(text_of(texts, validation={"fraction": FRACTION}, **options))


def test_a_near_copy_of_training_text_is_not_held_out(text_of: TextOf) -> None:
    texts = sentences(60)
    chosen = [text for text in texts if is_chosen(text)]
    assert held_out(prepared(text_of, texts)) == chosen and len(chosen) > 10
    texts.append(variant(chosen[3], False))
    found = prepared(text_of, texts)
    assert held_out(found) == [*chosen[:3], *chosen[4:]]
    assert sorted(documents(found.train[0], ByteTokenizer()) + held_out(found)) == sorted(texts)
    near = found.info["sources"][0]["near_copies"]
    assert (near["documents"], near["bytes"]) == (1, len(chosen[3].encode()))
    assert [Path(name).name for name in near["names"]] == [f"{texts.index(chosen[3]):03}.txt"]
    assert found.info["overlap"]["in_training_text"] == 0 < found.info["overlap"]["windows"]


def test_a_near_copy_of_a_near_copy_is_not_held_out_either(text_of: TextOf) -> None:
    texts = sentences(60)
    first, second, *rest = [text for text in texts if is_chosen(text)]
    half = len(second) // 2
    # the first is half of training text; a fourth text is like the first where it is like nothing else
    one = variant(texts[next(n for n, text in enumerate(texts) if not is_chosen(text))][:1000] + first[:1500], True)
    other = variant(first[:1500] + second[half:], True)
    texts = [text for text in texts if text not in (first, second)]
    assert held_out(prepared(text_of, [*texts, other])) == [*rest, other]
    assert held_out(prepared(text_of, [*texts, one, other])) == rest


def test_the_tokenizer_is_trained_on_what_is_trained_on(text_of: TextOf) -> None:
    texts = sentences(60)
    chosen = next(text for text in texts if is_chosen(text))
    options = {"tokenizer": {"vocabulary": 300}, "validation": {"fraction": FRACTION}}
    near = text_of([*texts, variant(chosen + "secret" * 400, False), chosen + "secret" * 400], **options)
    assert any("secret" in piece for piece in map(prepare(near).tokenizer.decode, ([n] for n in range(300))))


def test_text_of_one_template_is_held_out_as_usual_and_the_overlap_reported(text_of: TextOf) -> None:
    texts = [f"{number} the same service answered the same request in time, and went on\n" * 3 for number in range(60)]
    found = prepared(text_of, texts)
    assert held_out(found) == [text for text in texts if is_chosen(text)]
    share = found.info["overlap"]["share"]
    assert share > 0.3
    note = f"{share:.1%} of the 50-byte windows of the held-out text occur in the training text"
    assert list(text_notes(found.info)) == [note]


def test_validation_sources_stay_unchanged_and_the_overlap_is_reported(tmp_path: Path, text_of: TextOf) -> None:
    texts = sentences(30)
    (tmp_path / "held.txt").write_text(texts[4] + sentences(31)[30])
    found = prepare(text_of(texts, validation={"sources": [{"kind": "files", "paths": [str(tmp_path / "held.txt")]}]}))
    assert held_out(found) == [texts[4] + sentences(31)[30]]
    assert found.info["overlap"]["share"] == pytest.approx(0.5, abs=0.05)


def test_they_are_searched_once_and_never_in_a_remote_source(text_of: TextOf) -> None:
    texts = sentences(60)
    copied = next(text for text in texts if is_chosen(text))
    sources = open_sources(text_of([*texts, variant(copied, False)], validation={"fraction": FRACTION}))
    first = near_copies(sources, "keep")
    assert first == {sha256(copied.encode()).digest()[:16]}

    def unread() -> Any:
        raise AssertionError("read again")

    (source,) = sources
    cached = source._replace(documents=unread)
    assert near_copies([cached], "keep") == first
    remote = Source("hub", "a", None, True, unread, held_out=FRACTION)
    assert near_copies([remote], "keep") == frozenset()
