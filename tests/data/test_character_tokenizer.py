"""A tokenizer of an alphabet: each character is one token, and missing characters are reported."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lmlong import recipe
from lmlong.data.text_info import notes
from lmlong.data.token_dataset import prepare
from lmlong.data.tokenizers import load_tokenizer, train_tokenizer
from lmlong.data.tokenizers.characters import CharacterTokenizer
from lmlong.errors import RecipeError, UsageError

GENOME = {"kind": "characters", "alphabet": "ACGTN"}


def test_each_character_is_one_token_in_the_order_of_the_alphabet() -> None:
    tokenizer = train_tokenizer([], recipe.Tokenizer.model_validate(GENOME))
    assert tokenizer.encode("GATTACAN") == [2, 0, 3, 3, 0, 1, 0, 4]
    assert (tokenizer.vocabulary, tokenizer.bos, tokenizer.eos) == (7, 5, 6)
    assert tokenizer.token_bytes.tolist() == [1, 1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("alphabet", "unknown", "tokens"), [("ACGT", "error", 6), ("ACGT", "replace", 7), ("A\ufffd", "replace", 4)]
)
def test_a_recipe_knows_how_many_tokens_there_are(alphabet: str, unknown: str, tokens: int) -> None:
    options = recipe.Tokenizer.model_validate({"kind": "characters", "alphabet": alphabet, "unknown": unknown})
    assert options.most_tokens == train_tokenizer([], options).vocabulary == tokens
    assert not options.trained


def test_what_the_alphabet_lacks_is_replaced_where_that_is_wanted() -> None:
    tokenizer = CharacterTokenizer("ACGT", "replace")
    assert tokenizer.decode(tokenizer.encode("ACRT\nyA😀")) == tokenizer.representable("ACRT\nyA😀") == "AC�T��A�"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "characters"}, "alphabet: required by a tokenizer of this kind"),
        ({"kind": "bytes", "alphabet": "AC"}, "alphabet: not used by a tokenizer of kind bytes"),
        ({"kind": "characters", "alphabet": "ACGTA"}, "alphabet: contains 'A' more than once"),
        ({"kind": "characters", "alphabet": "A\ud800"}, "alphabet: expected text"),
        ({"kind": "characters", "alphabet": ""}, "alphabet: "),
    ],
)
def test_invalid_alphabets_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe.Tokenizer(**options)  # type: ignore[arg-type]


def test_an_error_names_the_first_place_and_all_missing_characters(text_of: Callable[..., recipe.Text]) -> None:
    documents = ["ACGT\n" * 30_000 + "ACGTRA\nYA", "ACGT" * 10]
    message = r"000\.txt: line 30,001, character 5: 'R' \(U\+0052\) is not in the alphabet .*, nor are 'Y' \(U\+0059\)"
    with pytest.raises(UsageError, match=rf"{message}\..*text\.tokenizer\.unknown=replace"):
        prepare(text_of(documents, tokenizer={"kind": "characters", "alphabet": "ACGT\n"}))


def test_what_is_replaced_is_counted(text_of: Callable[..., recipe.Text]) -> None:
    tokenizer = {"kind": "characters", "alphabet": "ACGT", "unknown": "replace"}
    dataset = prepare(text_of(["ACGT" * 30 + "\n" + "ACGN" * 30 + "\n"] * 3, tokenizer=tokenizer))
    (source,) = dataset.info["sources"]
    assert source["read"]["replaced_characters"] == 3 * 32
    assert "U+FFFD in place of 96 characters missing from text.tokenizer.alphabet" in list(notes(source))


def test_a_prompt_with_another_character_is_refused_with_its_place() -> None:
    with pytest.raises(UsageError, match=r"^character 8: 'X'"):
        CharacterTokenizer("ACGT").encode("GATTACAX")


@pytest.mark.parametrize(
    "change", [lambda file: file[:-9], lambda file: file.replace(b"AC", b"AA"), lambda file: file[:30]]
)
def test_a_damaged_file_is_refused(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(change(CharacterTokenizer("ACGT").file))
    with pytest.raises(UsageError, match=r"tokenizer\.model: .*damaged"):
        load_tokenizer(path)
