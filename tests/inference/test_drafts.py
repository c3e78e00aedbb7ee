"""Drafts change no text, no log-probability and no state, only how many passes over the weights are made."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from machine import needs_native
from models import model_of

from lmlong.attention.base import state_tensors
from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.decode.choice import fast_engine
from lmlong.inference import drafts
from lmlong.inference.drafts import (
    FIRST_SINGLE_STEPS,
    IDLE_STEPS,
    LONGEST_REST,
    MAX_DRAFT,
    MAX_PASSES,
    Drafts,
    Lookup,
    Pace,
)
from lmlong.inference.generation import Generation
from lmlong.inference.session import Session, prefill
from lmlong.model.language_model import LanguageModel
from lmlong.model.sampling_options import Sampling

BYTES = ByteTokenizer()
PROMPT = "def f(x): return x + 1\n" * 3


class RandomPace(Pace):
    """Drafts of any size, whether or not they pay, so that no test depends on the clock."""

    def __init__(self, seed: int = 0):
        super().__init__()
        self._draw = Random(seed)

    def draft_size(self, matched: int) -> int:
        return self._draw.choice((0, 1, 3, MAX_DRAFT))

    def add_pass(self, tokens: int, seconds: float) -> None:
        pass


def decoding(form: str) -> LanguageModel:
    model = model_of(form)
    model.engine = fast_engine(model, tried=False)
    return model


def read(model: LanguageModel, text: str = PROMPT, learn: bool = False) -> Session:
    return prefill(model, [[BYTES.bos, *BYTES.encode(text)]], learn=learn)


def assert_drafts_change_nothing(
    model: LanguageModel,
    session: Session,
    sampling: Sampling,
    max_tokens: int = 60,
    stop: tuple[str, ...] = (),
    eos: int = BYTES.eos,
) -> Generation:
    """Generate without drafts and with drafts; return the last generation."""
    tokenizer = ByteTokenizer()
    tokenizer.eos = eos
    plain, drafted = (
        Generation(model, tokenizer, session, sampling, [(0,)], max_tokens, stop, keep=True, drafts=each)
        for each in (None, Drafts(RandomPace()))
    )
    assert list(plain) == list(drafted)
    row, same = plain.rows[0], drafted.rows[0]
    assert (row.tokens, row.end) == (same.tokens, same.end) and plain.log_probabilities == drafted.log_probabilities
    for ends in ((plain.session, drafted.session), (plain.finished(), drafted.finished())):
        pairs = zip(*map(state_tensors, ends), strict=True)
        assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)
    return drafted


SAMPLINGS = [
    Sampling(temperature=0),
    Sampling(temperature=0, repetition_penalty=1.3, loop_penalty=1.0),
    Sampling(temperature=0.05, loop_penalty=0, seed=1),
    Sampling(temperature=0.3, top_k=5, top_p=0.9, min_p=0.05, repetition_penalty=1.1, seed=2),
    Sampling(temperature=0.8, seed=3),
]


@needs_native
@pytest.mark.parametrize(
    ("form", "sampling", "learn"),
    [*(("ngram", sampling, False) for sampling in SAMPLINGS), ("tables", SAMPLINGS[0], True)],
    ids=str,
)
def test_drafts_change_nothing(form: str, sampling: Sampling, learn: bool) -> None:
    model = decoding(form)
    drafts = assert_drafts_change_nothing(model, read(model, learn=learn), sampling, max_tokens=300).drafts
    assert drafts and 0 < drafts.counts.accepted < drafts.counts.drafted, "some are right and some wrong"


class CountingPace(RandomPace):
    """Drafts of two tokens from the `begin`-th token on that has an expectation; counts them all."""

    def __init__(self, begin: int):
        super().__init__()
        self._begin, self.asked, self.known = begin, 0, 0

    def add_token(self, matched: int, right: bool) -> None:
        self.known += 1

    def draft_size(self, matched: int) -> int:
        self.asked += 1
        return 2 if self.known >= self._begin else 0


@needs_native
def test_drafts_rest_while_they_do_not_pay_and_miss_no_token() -> None:
    model = decoding("ngram")
    session = read(model, PROMPT * 3)

    def generate(drafts: Drafts | None) -> list[int]:
        writing = Generation(model, BYTES, session, SAMPLINGS[0], max_tokens=600, keep=True, drafts=drafts)
        list(writing)
        return writing.rows[0].tokens

    plain, awake, never = generate(None), CountingPace(0), CountingPace(10**6)
    assert generate(Drafts(awake)) == plain == generate(Drafts(never))
    assert never.asked <= IDLE_STEPS + 4 + 600 // LONGEST_REST, "looks once in a rest"
    assert awake.known >= 590 and never.known >= 590 - LONGEST_REST, "but reads what was written meanwhile"
    later = CountingPace(300)
    drafts = Drafts(later)
    assert generate(drafts) == plain
    assert drafts.counts.passes > 60, "and drafts again when they pay"


@needs_native
@pytest.mark.parametrize("end", ["max_tokens", "stop", "eos"])
def test_a_text_may_end_within_a_draft(end: str) -> None:
    model = decoding("softmax")
    whole = Generation(model, BYTES, read(model), SAMPLINGS[0], max_tokens=60, keep=True)
    list(whole)
    written = whole.rows[0].tokens  # repeats parts of itself, and its beginning is part of the prompt below
    session = prefill(model, [[BYTES.bos, *BYTES.encode(PROMPT), *written[:40]]])
    within = False
    for at, token in list(enumerate(written[40:]))[::3]:
        if end == "stop" and token >= 128:
            continue
        options = {"max_tokens": at, "stop": (chr(token),), "eos": token}
        (row,) = assert_drafts_change_nothing(model, session, SAMPLINGS[0], **{end: options[end]}).rows
        within |= row.last_pass is not None and row.read < len(row.last_pass.tokens[0])
    assert within


def match_by_definition(tokens: list[int], begin: int) -> tuple[int | None, int]:
    """Return the index of the token that followed the last tokens earlier, and how many of them preceded it: it stays
    one match while the text follows it, else the last match of four tokens, else of two. The tokens before `begin` are
    known at once."""
    index, matched = None, 0
    for end in range(max(begin, 1), len(tokens) + 1):
        if index is not None and tokens[index] == tokens[end - 1]:
            index, matched = index + 1, matched + 1
            continue
        ends = ((size, at) for size in (4, 2) for at in range(end - 1, size - 1, -1))
        matches = ((at, size) for size, at in ends if tokens[at - size : at] == tokens[end - size : end])
        index, matched = next(matches, (None, 0))
    return index, matched


@settings(max_examples=60)
@given(st.lists(st.integers(0, 2), max_size=40), st.integers(0, 40), st.integers(1, 12))
def test_a_draft_is_what_followed_the_last_tokens(tokens: list[int], begin: int, size: int) -> None:
    lookup = Lookup(tokens[:begin])
    for token in tokens[begin:]:
        lookup.append(token)
    index, matched = match_by_definition(tokens, min(begin, len(tokens)))
    assert lookup.matched == matched and lookup.expected == (None if index is None else tokens[index])
    text = list(tokens)
    for _ in range(size if index is not None else 0):
        text.append(text[len(text) - len(tokens) + (index or 0)])
    assert lookup.draft(size) == text[len(tokens) :]


def test_a_long_text_is_looked_up_in_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "MEMORY", 20)
    lookup = Lookup(range(40))
    lookup.append(20)
    assert lookup.expected is None
    for token in (30, 31, 32):
        lookup.append(token)
    assert lookup.draft(3) == [33, 34, 35] and lookup.matched == 3


def paced(right: list[bool], additional: float) -> Pace:
    """The pace after tokens that were right or wrong, if an additional token takes this share of a single step."""
    pace = Pace()
    for tokens in [1] * 10 + [MAX_DRAFT + 1] * 40 + [1]:
        pace.add_pass(tokens, 1 + additional * (tokens - 1))
    for each in right * 100:
        for matched in range(20):
            pace.add_token(matched, each)
    return pace


@pytest.mark.parametrize(
    ("right", "additional", "sizes"),
    [
        ([True], 0.3, {MAX_DRAFT}),
        ([True], 0.99, {0}),  # reading a draft takes as long as single steps
        ([False], 0.01, {0}),
        ([True, False], 0.1, {2, 3, 4}),  # the sum of the first powers of 1/2, over the time
        ([True, False], 0.5, {0}),
    ],
)
def test_drafts_are_as_long_as_they_pay(right: list[bool], additional: float, sizes: set[int]) -> None:
    assert paced(right, additional).draft_size(3) in sizes


def test_single_steps_are_timed_first_and_from_time_to_time() -> None:
    pace = Pace()
    for _ in range(FIRST_SINGLE_STEPS):
        assert pace.draft_size(10) == 0
        pace.add_pass(1, 1.0)
    for _ in range(MAX_PASSES):
        assert pace.draft_size(10) > 0
        pace.add_pass(5, 1.1)
    assert pace.draft_size(10) == 0
    pace.add_pass(1, 1.0)
    assert pace.draft_size(10) > 0
