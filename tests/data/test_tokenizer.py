"""Tokenizers lose nothing: not a byte of any string, on the way in, on the way out, or in a stream."""

import io
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceTrainer

from lmlong import recipe
from lmlong.data.tokenizers import load_tokenizer, train_tokenizer
from lmlong.data.tokenizers.base import PART, ByteTokenizer, Tokenizer, parts
from lmlong.data.tokenizers.training import head, sample
from lmlong.errors import UsageError

from .conftest import sentences
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
    text = "def \n\n    return 中\r\n"
    assert (loaded.hash, loaded.vocabulary, loaded.bos, loaded.eos, loaded.encode(text)) == (
        *(tokenizer.hash, tokenizer.vocabulary, tokenizer.bos, tokenizer.eos, tokenizer.encode(text)),
    )


def test_training_is_deterministic_and_learns(subwords: Tokenizer) -> None:
    assert train_tokenizer(sentences(20), recipe.Tokenizer(vocabulary=400)).hash == subwords.hash
    assert subwords.vocabulary == 400
    text = sentences(21)[20]
    assert len(subwords.encode(text)) < len(text.encode()) / 2
    assert len(subwords.encode("\n        return self")) <= 4  # indentation is no run of single spaces


def test_lines_of_any_length_and_more_characters_than_the_vocabulary_are_learned() -> None:
    made = train_tokenizer(["abcdefgh" * 4000], recipe.Tokenizer(vocabulary=300))
    assert len(made.encode("abcdefgh" * 4)) <= 4
    text = "".join(chr(0x4E00 + number) for number in range(3000))
    made = train_tokenizer([text], recipe.Tokenizer(vocabulary=300))
    assert made.decode(made.encode(text)) == text


def test_a_small_text_gets_a_smaller_vocabulary_and_a_note(capfd: pytest.CaptureFixture[str]) -> None:
    made = train_tokenizer(["tiny text"], recipe.Tokenizer(vocabulary=4096))
    assert 259 < made.vocabulary < 300
    output = capfd.readouterr()
    assert output.err.startswith("text.tokenizer.vocabulary: the text yields")
    assert output.err.count("\n") == 1
    assert output.out == ""


def test_a_text_without_pieces_is_refused() -> None:
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


BROKEN_PIECES = {"user_defined_symbols": ["abcdef"]}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: other_model(byte_fallback=False), "no pieces for single bytes"),
        (lambda: other_model(eos_id=-1), "no tokens for the begin and end"),
        (lambda: b"", "not a sentencepiece model"),
        (lambda: b"some text that is no model", "not a sentencepiece model"),
        (lambda: other_model(**BROKEN_PIECES).replace(b"abcdef", b"abcd\xff\xfe"), "a piece is not UTF-8"),
        (lambda: other_model(**BROKEN_PIECES).replace(b"abcdef", b"\xbfbcdef"), "a piece is not UTF-8"),
    ],
)
def test_models_that_would_lose_text_are_refused(tmp_path: Path, make: Callable[[], bytes], reason: str) -> None:
    path = tmp_path / "other.model"
    path.write_bytes(make())
    with pytest.raises(UsageError, match=f"other.model: .*{reason}"):
        load_tokenizer(path)


def test_a_sample_is_all_of_a_short_text_and_an_even_part_of_a_long_one() -> None:
    assert sample(["ab", "cd"], 4) == ["ab", "cd"]
    found = [int(text) for text in sample([f"{number:07}" for number in range(10_000)], 3_500)]
    assert 450 <= len(found) <= 500 and found == sorted(found)
    for begin in range(0, 10_000, 1_000):
        assert 35 <= sum(begin <= number < begin + 1_000 for number in found) <= 65
    assert list(head(["é", "é", "a"], 4)) == ["é", "é"]
