"""Tokenizers lose nothing: not a byte of any string, on the way in, on the way out, or in a stream."""

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceTrainer

from lmlong import recipe
from lmlong.data.text_info import notes
from lmlong.data.token_dataset import prepare
from lmlong.data.tokenizers import load_tokenizer, train_tokenizer
from lmlong.data.tokenizers.base import PART, ByteTokenizer, Tokenizer, parts
from lmlong.data.tokenizers.boundaries import settled
from lmlong.data.tokenizers.characters import CharacterTokenizer
from lmlong.data.tokenizers.training import head, sample
from lmlong.errors import RecipeError, UsageError

from .conftest import TextOf, sentences
from .tokenizer_draws import examine

TRAPS = ["▁", "\0", "\r\n", "\r", "\n", "  ", " ", "\t", "<s>", "</s>", "<unk>", "<0x41>", "▅", " ⁇ ", "\ufeff"]
TRAPS += ["\ud800", "\udc00", "é", "e\u0301", "ﬁ", "中", "😀", "def ", "return", "\u2028", "\ufffd"]


def other_model(**options: object) -> bytes:
    """A model with sentencepiece's own defaults."""
    model = io.BytesIO()
    defaults = {"vocab_size": 400, "hard_vocab_limit": False, "minloglevel": 2, "byte_fallback": True}
    texts = (line for text in sentences(10) for line in text.splitlines())
    SentencePieceTrainer.train(sentence_iterator=texts, model_writer=model, **(defaults | options))
    return model.getvalue()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.lists(st.one_of(st.sampled_from(TRAPS), st.text(max_size=5))).map("".join), number=st.integers(0, 99))
def test_no_text_is_lost(tokenizer: Tokenizer, text: str, number: int) -> None:
    assert examine(random.Random(number), tokenizer, text) == []


def test_a_stream_gives_whole_characters_and_broken_bytes_at_once() -> None:
    stream = ByteTokenizer().stream()
    assert [stream.feed(byte) for byte in "é中".encode()] == ["", "é", "", "", "中"]
    assert stream.feed(0xFF) == "\ufffd"
    assert [stream.feed(byte) for byte in b"\xe4a"] == ["", "\ufffda"]
    assert stream.feed(0xF0) == ""
    assert stream.finish() == "\ufffd"


@pytest.mark.parametrize("text", ["word\n" * 9000, "return " * PART, "a\n" + "▁ é" * PART])
def test_ids_do_not_depend_on_how_the_text_arrives(tokenizer: Tokenizer, text: str) -> None:
    whole = tokenizer.encode(text)
    for size in (997, PART, 3 * PART + 1):
        pieces = (text[start : start + size] for start in range(0, len(text), size))
        assert [token for part in parts(pieces) for token in tokenizer.encode_part(part)] == whole
    assert tokenizer.decode(whole) == tokenizer.representable(text)


def test_what_is_saved_is_what_is_loaded(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer.model")
    loaded = load_tokenizer(tmp_path / "tokenizer.model")
    for name in ("hash", "vocabulary", "bos", "eos"):
        assert getattr(loaded, name) == getattr(tokenizer, name)
    text = "def \n\n    return 中\r\n"
    assert loaded.encode(text) == tokenizer.encode(text)


def test_few_tokens_are_left_open_by_what_may_follow(tokenizer: Tokenizer) -> None:
    text, boundaries, left = tokenizer.representable(sentences(21)[20][:400]), tokenizer.boundaries, []
    for cut in range(100, 400):
        covers = boundaries.covers(text[:cut])
        left.append(len(covers[0].tokens) - settled(covers))
        if boundaries.longest == 1:
            assert covers == [(tokenizer.encode(text[:cut]), b"")]
    if boundaries.longest == 1:
        assert max(left) == 0 == settled(boundaries.covers("")), "no text changes the bytes or characters before it"
    else:
        assert 0 < sum(left) / len(left) < 4


def test_pieces_are_found_by_their_beginning(subwords: Tokenizer) -> None:
    pieces = [subwords.decode_bytes([token]) for token in range(subwords.vocabulary)]
    for begin in (b" ", b"re", b"sel", " é".encode(), b"\n  ", b"qqq"):
        expected = [token for token, data in enumerate(pieces) if data.startswith(begin) and data != begin]
        assert sorted(subwords.boundaries.tokens_beginning_with(begin).tolist()) == expected
    assert len(subwords.boundaries.tokens_beginning_with(b" "))


def test_training_is_deterministic_and_learns(subwords: Tokenizer) -> None:
    assert train_tokenizer(sentences(20), recipe.Tokenizer(vocabulary=400)).hash == subwords.hash
    assert subwords.vocabulary == 400
    text = sentences(21)[20]
    assert len(subwords.encode(text)) < len(text.encode()) / 2
    assert len(subwords.encode("\n        return self")) <= 4  # indentation is no run of single spaces


def test_lines_of_any_length_many_characters_and_white_space_alone_are_learned() -> None:
    made = train_tokenizer(["abcdefgh" * 4000], recipe.Tokenizer(vocabulary=300))
    assert len(made.encode("abcdefgh" * 4)) <= 4
    for text in ("".join(chr(0x4E00 + number) for number in range(3000)), " \t\r\n\x0b\x0c" * 500):
        made = train_tokenizer([text], recipe.Tokenizer(vocabulary=300))
        assert made.decode(made.encode(text)) == text


def test_a_small_text_gets_a_smaller_vocabulary_and_a_note_and_one_without_pieces_is_refused(
    capfd: pytest.CaptureFixture[str],
) -> None:
    made = train_tokenizer(["tiny text"], recipe.Tokenizer(vocabulary=4096))
    assert 259 < made.vocabulary < 300
    output = capfd.readouterr()
    assert output.err.startswith("text.tokenizer.vocabulary: the text yields")
    assert output.err.count("\n") == 1 and output.out == ""
    with pytest.raises(UsageError, match=r"^text\.tokenizer: sentencepiece cannot train .*no pieces"):
        train_tokenizer(["\ufffd" * 50], recipe.Tokenizer(vocabulary=300, algorithm="unigram"))


@pytest.mark.parametrize("options", [{}, {"model_type": "bpe"}, {"normalization_rule_name": "nmt_nfkc_cf"}])
def test_other_models_are_made_lossless(tmp_path: Path, options: dict[str, object]) -> None:
    path = tmp_path / "other.model"
    path.write_bytes(other_model(**options))
    loaded = train_tokenizer([], recipe.Tokenizer(path=str(path)))
    text = "".join(TRAPS) * 2 + " A  b\n"
    assert loaded.decode(loaded.encode(text)) == text
    loaded.save(tmp_path / "copy.model")
    assert (tmp_path / "copy.model").read_bytes() == path.read_bytes()


def split_piece(broken: bytes) -> bytes:
    return other_model(user_defined_symbols=["abcdef"]).replace(b"abcdef", broken)


LOSING: list[tuple[Callable[[], bytes], str]] = [
    (lambda: other_model(byte_fallback=False), "no pieces for single bytes"),
    (lambda: other_model(eos_id=-1), "no tokens for the begin and end"),
    (lambda: b"", "not a sentencepiece model"),
    (lambda: b"some text that is no model", "not a sentencepiece model"),
    (lambda: split_piece(b"abcd\xff\xfe"), "a piece is not UTF-8"),
    (lambda: split_piece(b"\xbfbcdef"), "a piece is not UTF-8"),
    (lambda: CharacterTokenizer("ACGT").file[:-9], "damaged"),
    (lambda: CharacterTokenizer("ACGT").file[:30], "damaged"),
    (lambda: CharacterTokenizer("ACGT").file.replace(b"AC", b"AA"), "damaged"),
]


@pytest.mark.parametrize(("make", "reason"), LOSING)
def test_models_that_would_lose_text_are_refused(tmp_path: Path, make: Callable[[], bytes], reason: str) -> None:
    path = tmp_path / "other.model"
    path.write_bytes(make())
    with pytest.raises(UsageError, match=rf"other\.model: .*{reason}"):
        load_tokenizer(path)


def test_a_sample_is_all_of_a_short_text_and_an_even_part_of_a_long_one() -> None:
    assert sample(["ab", "cd"], 4) == ["ab", "cd"]
    found = [int(text) for text in sample([f"{number:07}" for number in range(10_000)], 3_500)]
    assert 450 <= len(found) <= 500 and found == sorted(found)
    for begin in range(0, 10_000, 1_000):
        assert 35 <= sum(begin <= number < begin + 1_000 for number in found) <= 65
    assert list(head(["é", "é", "a"], 4)) == ["é", "é"]


def test_each_character_is_one_token_in_the_order_of_the_alphabet() -> None:
    tokenizer = train_tokenizer([], recipe.Tokenizer(kind="characters", alphabet="ACGTN"))
    assert tokenizer.encode("GATTACAN") == [2, 0, 3, 3, 0, 1, 0, 4]
    assert (tokenizer.vocabulary, tokenizer.bos, tokenizer.eos) == (7, 5, 6)
    assert tokenizer.token_bytes.tolist() == [1, 1, 1, 1, 1, 0, 0]


def test_a_recipe_knows_how_many_tokens_there_are_and_refuses_invalid_alphabets() -> None:
    sizes: Any = [("ACGT", "error", 6), ("ACGT", "replace", 7), ("A\ufffd", "replace", 4)]
    for alphabet, unknown, tokens in sizes:
        options = recipe.Tokenizer(kind="characters", alphabet=alphabet, unknown=unknown)
        assert options.most_tokens == train_tokenizer([], options).vocabulary == tokens
        assert not options.trained
    invalid = {"ACGTA": "alphabet: contains 'A' more than once", "A\ud800": "alphabet: expected text", "": "alphabet: "}
    for alphabet, message in invalid.items():
        with pytest.raises(RecipeError, match=message):
            recipe.Tokenizer(kind="characters", alphabet=alphabet)
    with pytest.raises(RecipeError, match="alphabet: required by a tokenizer of this kind"):
        recipe.Tokenizer(kind="characters")
    with pytest.raises(RecipeError, match="alphabet: not used by a tokenizer of kind bytes"):
        recipe.Tokenizer(kind="bytes", alphabet="AC")


def test_an_error_names_the_first_place_and_all_missing_characters(text_of: TextOf) -> None:
    documents = ["ACGT\n" * 30_000 + "ACGTRA\nYA", "ACGT" * 10]
    message = r"000\.txt: line 30,001, character 5: 'R' \(U\+0052\) is not in the alphabet .*, nor are 'Y' \(U\+0059\)"
    with pytest.raises(UsageError, match=rf"{message}\..*text\.tokenizer\.unknown=replace"):
        prepare(text_of(documents, tokenizer={"kind": "characters", "alphabet": "ACGT\n"}))
    with pytest.raises(UsageError, match=r"^character 8: 'X'"):  # of a prompt
        CharacterTokenizer("ACGT").encode("GATTACAX")


def test_what_the_alphabet_lacks_is_replaced_and_counted_where_that_is_wanted(text_of: TextOf) -> None:
    tokenizer = CharacterTokenizer("ACGT", "replace")
    assert tokenizer.decode(tokenizer.encode("ACRT\nyA😀")) == tokenizer.representable("ACRT\nyA😀") == "AC�T��A�"
    options = {"kind": "characters", "alphabet": "ACGT", "unknown": "replace"}
    dataset = prepare(text_of(["ACGT" * 30 + "\n" + "ACGN" * 30 + "\n"] * 3, tokenizer=options))
    (source,) = dataset.info["sources"]
    assert source["read"]["replaced_characters"] == 3 * 32
    assert "U+FFFD in place of 96 characters missing from text.tokenizer.alphabet" in list(notes(source))
