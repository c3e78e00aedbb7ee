"""With `text.duplicates=drop`, documents with the text of an earlier one are skipped and reported."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from lmlong import recipe
from lmlong.data.token_dataset import prepare
from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.evaluation.perplexity import validation_text

from .conftest import sentences
from .test_tokens import documents

TextOf = Callable[..., recipe.Text]
HALF = {"fraction": 0.5}


def test_the_first_of_each_text_is_kept(text_of: TextOf) -> None:
    texts = sentences(30)
    kept, dropped = (text_of([*texts, *texts[3:6], "", texts[3]], duplicates=choice) for choice in ("keep", "drop"))
    found = prepare(dropped)
    assert sorted(documents(found.train[0], found.tokenizer) + documents(found.validation, found.tokenizer)) == sorted(
        texts
    )
    folder = Path(dropped.sources[0].paths[0])  # type: ignore[union-attr]
    (source,) = found.info["sources"]
    assert source["skipped"]["a duplicate"] == {
        "documents": 4,
        "bytes": sum(len(texts[number].encode()) for number in (3, 4, 5, 3)),
        "names": [str(folder / f"{number:03}.txt") for number in (30, 31, 32, 34)],
    }
    assert source["skipped"]["empty"]["documents"] == 1
    usual = prepare(kept)
    assert usual.folder != found.folder
    assert len(usual.train[0].starts) + len(usual.validation.starts) == 34


def test_what_is_kept_without_the_choice_has_the_key_that_it_always_had(text_of: TextOf) -> None:
    """So no corpus is tokenized again because of an option that it does not use."""
    text = text_of(sentences(3))
    assert prepare(text).folder == prepare(text.model_copy(update={"duplicates": "keep"})).folder
    assert prepare(text).folder.name == "949229cf5cc0fadd257c923367b571e7"


def test_of_training_and_held_out_text_the_training_text_loses(tmp_path: Path, text_of: TextOf) -> None:
    texts = sentences(25)
    (tmp_path / "held").mkdir()
    for name, text in (("a", texts[4]), ("b", "held out alone"), ("c", texts[4])):
        (tmp_path / "held" / f"{name}.txt").write_text(text)
    held = {"sources": [{"kind": "files", "paths": [str(tmp_path / "held")]}]}
    text = text_of([*texts, texts[4]], validation=held, duplicates="drop")
    found = prepare(text)
    assert documents(found.validation, found.tokenizer) == [texts[4], "held out alone"]
    assert documents(found.train[0], found.tokenizer) == [text for text in texts if text != texts[4]]
    train, validation = (source["skipped"] for source in found.info["sources"])
    assert {reason: count["documents"] for reason, count in train.items()} == {"in the validation text": 2}
    assert {reason: count["documents"] for reason, count in validation.items()} == {"a duplicate": 1}


def test_a_text_of_two_sources_is_of_the_first(tmp_path: Path) -> None:
    sources = []
    for name, own in (("one", "first " * 9), ("two", "second " * 9)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("of both " * 9)
        (tmp_path / name / "b.txt").write_text(own)
        sources.append({"kind": "files", "paths": [str(tmp_path / name)]})
    options = {"sources": sources, "tokenizer": {"kind": "bytes"}, "sequence_length": 16, "duplicates": "drop"}
    found = prepare(recipe.Text.model_validate(options | {"validation": HALF}))
    assert [source["read"]["documents"] for source in found.info["sources"]] == [2, 1]
    assert found.info["sources"][1]["skipped"]["a duplicate"]["names"] == [str(tmp_path / "two" / "a.txt")]


def test_the_tokenizer_sees_each_text_once(text_of: TextOf) -> None:
    texts, subwords = sentences(30), {"vocabulary": 300}
    once = prepare(text_of(texts, tokenizer=subwords, duplicates="drop"))
    more = [*texts, *[texts[0]] * 50]
    assert prepare(text_of(more, tokenizer=subwords, duplicates="drop")).tokenizer.hash == once.tokenizer.hash
    assert prepare(text_of(more, tokenizer=subwords)).tokenizer.hash != once.tokenizer.hash


def test_a_text_that_is_measured_is_read_as_it_is(text_of: TextOf) -> None:
    """`lmlong eval --data FILE` makes token files that train on the same files, which must not lose them."""
    texts = sentences(3)
    text = text_of([*texts, texts[0]], duplicates="drop")
    loaded = SimpleNamespace(recipe=SimpleNamespace(text=text), tokenizer=ByteTokenizer())
    folder = Path(text.sources[0].paths[0])  # type: ignore[union-attr]
    assert documents(validation_text(loaded, [folder]), ByteTokenizer()) == [*texts, texts[0]]  # type: ignore[arg-type]
