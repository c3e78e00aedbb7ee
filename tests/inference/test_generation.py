"""Streams of tokens against the model computed from scratch, streams of text against whole strings, and rows side by
side, of which an error or an interrupt of one affects no other."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import predict

from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.decode.engine import EagerEngine, Pass
from lmlong.inference import session as sessions
from lmlong.inference.generation import Generation
from lmlong.inference.loading import load
from lmlong.inference.row import Row, StreamedText, advance
from lmlong.inference.session import next_logits, prefill
from lmlong.model.finite import NotFinite
from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.model.sampling_options import Sampling
from lmlong.model.state_size import size, state_size

from .conftest import prose

ModelOf = Callable[[str], LanguageModel]

BYTES = ByteTokenizer()
PROMPT = [BYTES.bos, *BYTES.encode("to be or not to be, that")]
NEVER = -1  # no token
GREEDY = Sampling(temperature=0)


class Bytes(ByteTokenizer):
    """Bytes, with another token as the end of a document."""

    def __init__(self, eos: int = NEVER):
        super().__init__()
        self.eos = eos


def text_of(tokens: Iterable[int], stop: list[str]) -> list[str]:
    """The pieces of text that tokens come out as; none is asked for after a stop string."""
    text, pieces = StreamedText(BYTES, stop), []
    for token in tokens:
        pieces.append(text.feed(token))
        if text.stopped:
            break
    return [piece for piece in [*pieces, text.finish()] if piece]


def until(pieces: Iterable[str], stop: list[str]) -> list[str]:
    text = StreamedText(BYTES, stop)
    return [piece for piece in [*map(text.add, pieces), text.finish()] if piece]


def written(model: LanguageModel, prompt: list[int], options: Sampling, count: int, eos: int = NEVER) -> Generation:
    """The finished generation after a prompt."""
    writing = Generation(model, Bytes(eos), prefill(model, [prompt]), options, max_tokens=count, keep=True)
    assert list(writing)
    return writing


@torch.no_grad()
def from_scratch(model: LanguageModel, prompt: list[int], count: int) -> list[int]:
    """The likeliest tokens one after another, everything read again for each."""
    tokens = list(prompt)
    for _ in range(count):
        logits, _ = predict(model, torch.tensor([tokens]))
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_a_stream_has_the_tokens_of_a_model_that_reads_everything_again(model_of: ModelOf, kind: str) -> None:
    model = model_of(kind)
    expected = from_scratch(model, PROMPT, 20)
    assert len(set(expected)) > 3
    assert written(model, PROMPT, GREEDY, 20).rows[0].tokens == expected


@pytest.mark.parametrize("kind", ["linear", "softmax"])
@pytest.mark.parametrize("piece", [1, 3])
def test_a_prompt_read_in_pieces_is_the_same_prompt(
    model_of: ModelOf, kind: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(kind)
    with torch.no_grad():
        whole, _ = predict(model, torch.tensor([PROMPT]))
    monkeypatch.setattr(sessions, "PREFILL_TOKENS", piece)
    logits, _ = next_logits(model, prefill(model, [PROMPT]))
    torch.testing.assert_close(logits, whole[:, -1], rtol=1e-10, atol=1e-10)


HEADS, WIDTH = 2, 8
PER_KEY = 2 * HEADS * WIDTH + 1
LINEAR = 2 * HEADS * WIDTH * (WIDTH + 1) + 2 * 3 * 3 * 16 + 1
"""S and z of each head and three past inputs of q, k and v in two layers, and the position."""


@pytest.mark.parametrize(
    ("kind", "growth", "empty"),
    [("linear", 0, LINEAR), ("softmax", 2 * PER_KEY, None), ("downsampled", 0, None)],
)
def test_the_state_grows_as_its_attention_says(model_of: ModelOf, kind: str, growth: int, empty: int | None) -> None:
    model = model_of(kind)
    declared = state_size(model)
    assert declared.per_token.numbers == growth
    assert empty is None or declared.empty == (empty, 8 * empty)
    for tokens in (1, 5, len(PROMPT)):
        _, state = next_logits(model, prefill(model, [PROMPT[:tokens]]))
        assert size(state).numbers == declared.empty.numbers + tokens * growth
        assert size(state).bytes == declared.empty.bytes + tokens * declared.per_token.bytes
    blocks = state_size(model_of("downsampled softmax"))
    assert blocks.per_token.numbers == 2 * PER_KEY + PER_KEY // 4, "a layer that reads blocks has a key for each"


def test_pieces_of_text_are_whole_characters() -> None:
    assert text_of(BYTES.encode("aé€😀z"), []) == ["a", "é", "€", "😀", "z"]
    assert text_of(BYTES.encode("a😀")[:-1], []) == ["a", "\ufffd"], "what the end cut off"


def test_no_token_is_asked_for_after_a_stop_string() -> None:
    tokens = iter(BYTES.encode("abcde"))
    assert "".join(text_of(tokens, ["c"])) == "ab"
    assert BYTES.decode(tokens) == "de"


def test_text_is_held_back_only_while_it_may_become_a_stop_string() -> None:
    assert until(["x", "a", "b", "y", "a"], ["abc"]) == ["x", "aby", "a"]
    assert until(["xa", "b", "c", "z"], ["abc"]) == ["x"]


def cut_at_the_first_complete(text: str, stop: list[str]) -> str:
    """The definition: read character by character until the text ends in a stop string, then drop the longest such."""
    for end in range(len(text) + 1):
        if complete := [word for word in stop if text[:end].endswith(word)]:
            return text[: end - max(map(len, complete))]
    return text


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text("ab", max_size=4), max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_where_a_text_is_cut_into_pieces_makes_no_difference(pieces: list[str], stop: list[str]) -> None:
    assert "".join(until(pieces, stop)) == cut_at_the_first_complete("".join(pieces), stop)


PROMPTS = [PROMPT, PROMPT[:3], [BYTES.bos], [BYTES.bos, *BYTES.encode("whether 'tis nobler in the mind to suffer the")]]
every_kind = pytest.mark.parametrize("kind", ["linear", "softmax", "downsampled", "downsampled softmax"])


@every_kind
def test_each_prompt_of_a_batch_gives_what_it_gives_alone(model_of: ModelOf, kind: str) -> None:
    model, options = model_of(kind), Sampling(temperature=1.0, seed=3)
    together = [prefill(model, [prompt]) for prompt in PROMPTS]
    writing = Generation(model, Bytes(), together, options, [(n, 0) for n in range(4)], 25, keep=True)
    list(writing)
    for number, session in enumerate(together):
        alone = Generation(model, Bytes(), session, options, [(number, 0)], 25, keep=True)
        list(alone)
        assert writing.rows[number].tokens == alone.rows[0].tokens
        assert writing.log_probabilities[number] == pytest.approx(alone.log_probabilities[0], abs=1e-9)


def test_rows_end_each_for_its_own_reason(model_of: ModelOf) -> None:
    model = model_of("linear")
    first, second = (from_scratch(model, prompt, 12) for prompt in PROMPTS[:2])
    eos = first[5]
    stop = BYTES.decode(second[8:9])
    cut = [tokens[: tokens.index(eos)] if eos in tokens else tokens for tokens in (first, second)]
    sessions = [prefill(model, [prompt]) for prompt in PROMPTS[:2]]
    writing = Generation(model, Bytes(eos), sessions, GREEDY, [(0,), (1,)], 12, [stop], keep=True)
    texts = ["", ""]
    for row, piece in writing:
        texts[row] += piece
    for row, tokens, text in zip(writing.rows, cut, texts, strict=True):
        whole = BYTES.decode(tokens)
        assert text == whole.partition(stop)[0]
        assert row.end == ("stop" if stop in whole else "eos" if len(tokens) < 12 else "max_tokens")
    assert {row.end for row in writing.rows} == {"eos", "stop"}


def test_the_end_of_the_document_is_not_drawn_if_it_is_ignored(model_of: ModelOf) -> None:
    model = model_of("linear")
    likeliest = from_scratch(model, PROMPT, 6)
    eos = likeliest[5]
    writing = written(model, PROMPT, Sampling(temperature=0, ignore_eos=True), 12, eos)
    tokens = writing.rows[0].tokens
    assert len(tokens) == 12 and eos not in tokens
    assert tokens[: likeliest.index(eos)] == likeliest[: likeliest.index(eos)]


def test_log_probabilities_are_those_of_the_model_before_the_temperature(model_of: ModelOf) -> None:
    model = model_of("linear")
    writing = written(model, PROMPT, Sampling(temperature=0.3, top_k=5), 9)
    tokens = writing.rows[0].tokens
    with torch.no_grad():
        logits, _ = predict(model, torch.tensor([PROMPT + tokens]))
    expected = logits.log_softmax(-1)[0, len(PROMPT) - 1 : -1].gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    assert writing.log_probabilities[0] == pytest.approx(expected.tolist(), abs=1e-9)


def test_a_memory_knows_the_last_tokens_of_its_text(model_of: ModelOf) -> None:
    model, text = model_of("linear"), [BYTES.bos, *BYTES.encode("x" * 3000 + "the end")]
    writing = written(model, text, GREEDY, 5)
    expected = [*text, *writing.rows[0].tokens]
    assert writing.session.recent == tuple(expected[-sessions.RECENT :])
    assert writing.session.total == len(expected)
    assert prefill(model, [PROMPT]).recent == tuple(PROMPT)


class CountingEngine(EagerEngine):
    """Counts what it is asked for."""

    def __init__(self, model: LanguageModel):
        super().__init__(model)
        self.loads = self.reads = self.saves = 0

    def load(self, state: ModelState) -> Any:
        self.loads += 1
        return super().load(state)

    def read(self, rows: Sequence[Any], tokens: Sequence[Sequence[int]]) -> Pass:
        self.reads += 1
        return super().read(rows, tokens)

    def save(self, row: Any, tokens: int = 0) -> ModelState:
        self.saves += 1
        return super().save(row, tokens)


def test_penalty_on_repetition_saves_no_state(model_of: ModelOf) -> None:
    model = model_of("linear")
    sessions = [prefill(model, [prompt]) for prompt in PROMPTS[:3]]
    model.engine = engine = CountingEngine(model)
    options = Sampling(repetition_penalty=1.3, ignore_eos=True)
    list(Generation(model, BYTES, sessions, options, [(number,) for number in range(3)], 20))
    assert (engine.loads, engine.reads, engine.saves) == (3, 20, 0)


def test_row_is_loaded_once_its_unread_text_is_read(subword_run: Path) -> None:
    loaded = load(subword_run, "cpu")
    session = loaded.read(prose(60, seed=7)[:163])
    assert session.unread.pending
    loaded.model.engine = engine = CountingEngine(loaded.model)
    writing = loaded.generate(session, Sampling(temperature=0, ignore_eos=True), [(0,)], 5)
    assert len("".join(piece for _, piece in writing)) > 0
    weighed = engine.reads - 5  # each of these steps loads a state of its own
    assert weighed > 0 and engine.loads == weighed + 1


def test_value_that_is_not_finite_is_reported_also_of_a_token_that_may_not_follow(model_of: ModelOf) -> None:
    model = model_of("linear")
    with torch.no_grad():
        model.embedding.weight[ord("z")] = torch.nan
    row = Row(EagerEngine(model), BYTES, prefill(model, [PROMPT]), Sampling(temperature=0))
    row.head = b" "
    (drawn,) = advance(EagerEngine(model), [row])
    assert isinstance(drawn.error, NotFinite) and drawn.token is None


def test_row_that_fails_takes_no_random_numbers_of_others(model_of: ModelOf) -> None:
    model = model_of("linear")
    engine = EagerEngine(model)

    def rows(count: int) -> list[Row]:
        all_options = [Sampling(seed=5, temperature=1.5, loop_penalty=9), Sampling(repetition_penalty=1.2)]
        return [Row(engine, BYTES, prefill(model, [PROMPT]), options) for options in all_options[:count]]

    (alone,), (beside, failing) = rows(1), rows(2)
    for turn in range(20):
        failing.last_tokens.extend([-2] * (turn == 3))
        first, second = advance(engine, [beside, failing])
        assert first.token == advance(engine, [alone])[0].token
        assert (second.error is not None) == (turn >= 3)


def test_interrupt_ends_all_rows(model_of: ModelOf) -> None:
    class Interrupted(EagerEngine):
        def read(self, rows: Sequence[Any], tokens: Sequence[Sequence[int]]) -> Pass:
            if len(rows) > 1:
                raise KeyboardInterrupt
            return super().read(rows, tokens)

    model = model_of("linear")
    sessions = [prefill(model, [prompt]) for prompt in PROMPTS[:3]]
    model.engine = Interrupted(model)
    with pytest.raises(KeyboardInterrupt):
        list(Generation(model, BYTES, sessions, Sampling(), [(number,) for number in range(3)], 20))
