"""Streams of tokens against the model computed from scratch, and streams of text against whole strings."""

from collections.abc import Callable
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmlong.inference import streaming
from lmlong.inference.sampling import Sampler, Sampling
from lmlong.inference.state_size import size, state_size
from lmlong.inference.streaming import read, stream, stream_text, until
from lmlong.model.language_model import LanguageModel
from lmlong.recipe import AttentionKind
from lmlong.text.tokenizer import ByteTokenizer

ModelOf = Callable[[AttentionKind], LanguageModel]

BYTES = ByteTokenizer()
PROMPT = [BYTES.bos, *BYTES.encode("to be or not to be, that")]
NEVER = -1  # no token


def greedy() -> Sampler:
    return Sampler(Sampling(temperature=0))


@torch.no_grad()
def from_scratch(model: LanguageModel, prompt: list[int], count: int) -> list[int]:
    """The likeliest tokens one after another, everything read again for each."""
    tokens = list(prompt)
    for _ in range(count):
        logits, _ = model.prefill(torch.tensor([tokens]))
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_a_stream_is_what_the_model_says_read_from_scratch(model_of: ModelOf, kind: AttentionKind) -> None:
    model = model_of(kind)
    expected = from_scratch(model, PROMPT, 20)
    assert len(set(expected)) > 3
    assert list(stream(model, PROMPT, greedy(), 20, NEVER)) == expected


@pytest.mark.parametrize("kind", ["linear", "softmax"])
@pytest.mark.parametrize("piece", [1, 3, len(PROMPT) - 1])
def test_a_prompt_read_in_pieces_is_the_same_prompt(
    model_of: ModelOf, kind: AttentionKind, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(kind)
    with torch.no_grad():
        whole, _ = model.prefill(torch.tensor([PROMPT]))
    monkeypatch.setattr(streaming, "PIECE", piece)
    logits, _ = read(model, PROMPT, None)
    torch.testing.assert_close(logits, whole[:, -1], rtol=1e-10, atol=1e-10)


def test_a_stream_goes_on_from_a_state(model_of: ModelOf) -> None:
    model = model_of("linear")
    _, state = read(model, PROMPT[:10], None)
    assert list(stream(model, PROMPT[10:], greedy(), 8, NEVER, state)) == from_scratch(model, PROMPT, 8)


def test_a_stream_ends_before_eos(model_of: ModelOf) -> None:
    expected = from_scratch(model_of("linear"), PROMPT, 20)
    eos = expected[12]
    assert list(stream(model_of("linear"), PROMPT, greedy(), None, eos)) == expected[: expected.index(eos)]


def test_a_stream_without_a_limit_goes_on(model_of: ModelOf) -> None:
    tokens = stream(model_of("linear"), PROMPT, greedy(), None, NEVER)
    assert list(islice(tokens, 30)) == from_scratch(model_of("linear"), PROMPT, 30)
    assert list(stream(model_of("linear"), PROMPT, greedy(), 0, NEVER)) == []


def test_gradients_stay_on_for_the_caller_between_two_tokens(model_of: ModelOf) -> None:
    tokens = stream(model_of("linear"), PROMPT, greedy(), 2, NEVER)
    next(tokens)
    assert not torch.is_inference_mode_enabled()
    assert torch.ones(1, requires_grad=True).exp().requires_grad


@pytest.mark.parametrize(("kind", "growth"), [("linear", 0), ("softmax", 2 * (2 * 16 + 1))])
def test_the_state_grows_as_its_attention_says(model_of: ModelOf, kind: AttentionKind, growth: int) -> None:
    model = model_of(kind)
    declared = state_size(model)
    assert declared.per_token.numbers == growth
    for tokens in (1, 5, len(PROMPT)):
        _, state = read(model, PROMPT[:tokens], None)
        assert size(state).numbers == declared.empty.numbers + tokens * growth
        assert size(state).bytes == declared.empty.bytes + tokens * declared.per_token.bytes


def test_the_size_of_a_linear_state_in_closed_form(model_of: ModelOf) -> None:
    heads, width, tail = 2, 8, 3 * 3 * 16  # S and z of each head, then three past inputs of q, k and v
    numbers = 2 * (heads * width * (width + 1) + tail) + 1  # two layers and the position
    assert state_size(model_of("linear")).empty == (numbers, 8 * numbers)


def test_pieces_of_text_never_hold_half_a_character() -> None:
    text = "aé€😀z"
    assert list(stream_text(BYTES.encode(text), BYTES)) == ["a", "é", "€", "😀", "z"]


def test_a_character_cut_off_by_the_end_is_marked() -> None:
    assert list(stream_text(BYTES.encode("a😀")[:-1], BYTES)) == ["a", "\ufffd"]


def test_a_stop_string_is_found_across_tokens_and_not_printed() -> None:
    assert "".join(stream_text(BYTES.encode("one ENENDtwo"), BYTES, ["END"])) == "one EN"


def test_no_token_is_asked_for_after_a_stop_string() -> None:
    tokens = iter(BYTES.encode("abcde"))
    assert "".join(stream_text(tokens, BYTES, ["c"])) == "ab"
    assert BYTES.decode(tokens) == "de"


def test_text_is_held_back_only_while_it_may_become_a_stop_string() -> None:
    assert list(until(["x", "a", "b", "y", "a"], ["abc"])) == ["x", "aby", "a"]
    assert list(until(["xa", "b", "c", "z"], ["abc"])) == ["x"]


def test_the_stop_string_that_is_complete_first_ends_the_text() -> None:
    assert list(until(["abc"], ["abc", "b"])) == ["a"]
    assert list(until(["abc"], ["c", "bc"])) == ["a"]


def cut_at_the_first_complete(text: str, stop: list[str]) -> str:
    """The definition: read character by character until the text ends in a stop string, then drop the longest such."""
    for end in range(len(text) + 1):
        if complete := [word for word in stop if text[:end].endswith(word)]:
            return text[: end - max(map(len, complete))]
    return text


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text("ab", max_size=4), max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_where_a_text_is_cut_into_pieces_makes_no_difference(pieces: list[str], stop: list[str]) -> None:
    assert "".join(until(pieces, stop)) == cut_at_the_first_complete("".join(pieces), stop)
