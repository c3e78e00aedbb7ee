"""Requests side by side: each is written what it would be alone, and none waits for another."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from grids import every_nth
from machine import needs_native
from models import predict
from serving.schedulers import Told, running, subwords, tiny

from lmlong.attention.base import state_tensors
from lmlong.data.tokenizers.base import Tokenizer
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.sampling import Sampling
from lmlong.inference.session import Session
from lmlong.inference.state_table import Place, StateTable
from lmlong.model.state import rebuild_state, state_bytes
from lmlong.serving.api_errors import ApiError
from lmlong.serving.request import Request
from lmlong.serving.scheduler import Scheduler
from lmlong.serving.settings import Settings

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 9},
    {"top_p": 0.8, "min_p": 0.01},
    {"temperature": 0.7, "repetition_penalty": 1.3, "repetition_window": 5},
    {"temperature": 0.5, "loop_penalty": 5.0},
    {"temperature": 0.0, "loop_penalty": 1.0},
]

ENDLESS = Request("abc", Sampling(temperature=0), max_tokens=None)
"""A text without an end: the likeliest tokens go round and round."""


def requests(count: int) -> list[Request]:
    """Requests of many kinds."""
    return [
        Request(
            "abcab" + "dcba" * number,
            Sampling(**OPTIONS[number % len(OPTIONS)], seed=number),
            max_tokens=12 + 3 * number,
            stop=("bb", "a\n") if number % 3 == 0 else (),
            learn=number % 4 == 1,
        )
        for number in range(count)
    ]


def written_alone(trained: TrainedLanguageModel, request: Request) -> str:
    model, options = replace(trained, learn=request.learn), vars(request.sampling)
    return "".join(model.stream(request.prompt, max_tokens=request.max_tokens, stop=request.stop, **options))


def check_all_alone(trained: TrainedLanguageModel, asked: list[Request], *numbers_of_rows: int) -> None:
    expected = [written_alone(trained, request) for request in asked]
    for rows in numbers_of_rows:
        with running(trained, rows=rows) as scheduler:
            told = [Told(scheduler, request) for request in asked]
            assert [one.text() for one in told] == expected
        assert all(one.none_are_left() for one in told) and scheduler.active == scheduler.queued == 0
    assert len(set(expected)) > 0.75 * len(asked)


@needs_native
@every_nth(2, pytest.mark.parametrize("form", ["ngram", "softmax", "window beside delta", "elu"]))
def test_each_is_written_what_it_would_be_alone(form: str) -> None:
    check_all_alone(tiny(form, native=True), requests(9), 1, 4, 64)


@pytest.mark.parametrize("tokenizer", [None, subwords()], ids=["bytes", "subwords"])
def test_by_torch_and_with_prompts_that_end_within_a_word(tokenizer: Tokenizer | None) -> None:
    check_all_alone(tiny("delta", tokenizer=tokenizer), requests(6), 3)


def test_nobody_waits_for_a_long_prompt() -> None:
    with running(tiny(), rows=4) as scheduler:
        long = Told(scheduler, Request("abcd" * 40_000, max_tokens=2))
        short = Told(scheduler, Request("abc", max_tokens=5))
        assert len(short.text()) >= 1 and long.none_are_left()
        scheduler.cancel(long.writer)


def test_a_row_is_free_as_soon_as_its_request_is_cancelled() -> None:
    with running(tiny(), rows=1) as scheduler:
        endless = Told(scheduler, ENDLESS)
        endless.next()
        waiting, cancelled = (Told(scheduler, Request("abc", max_tokens=3)) for _ in range(2))
        scheduler.cancel(cancelled.writer)
        scheduler.cancel(endless.writer)
        assert waiting.all()[-1].end == "max_tokens"
        assert cancelled.none_are_left()
        while not endless.none_are_left():
            assert not endless.next().end
    assert scheduler.counts.cancelled == 2 and scheduler.active == scheduler.queued == 0


def test_who_closes_ends_all_requests() -> None:
    scheduler = Scheduler(tiny(), StateTable(tiny(), 0), Settings(rows=1))
    told = [Told(scheduler, ENDLESS) for _ in range(2)]
    told[0].next()
    scheduler.close()
    assert [one.all()[-1].error.code for one in told] == ["shutting_down"] * 2
    with pytest.raises(ApiError, match="shutting down"):
        Told(scheduler, Request("abc"))


def without_finite_values(session: Session) -> Session:
    state = session.state
    broken = rebuild_state(state, iter([x * math.nan for x in state_tensors(state)]))
    return session._replace(state=broken._replace(position=state.position))


DAMAGE: dict[str, Callable[[Session], Session]] = {
    "a token that there is not": lambda session: session._replace(recent=(10**6,)),
    "a negative token": lambda session: session._replace(recent=(-2, 97)),
    "no finite values": without_finite_values,
}


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_native)])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_row_that_cannot_be_written_fails_alone(damage: str, native: bool) -> None:
    """Files are checked before they become sessions; a row must not end others even if such a check fails."""
    trained, sampling = tiny(native=native), Sampling(temperature=1.0, repetition_penalty=1.2, ignore_eos=True)
    good = trained.read("abc")
    starts = [None, Place(b"", DAMAGE[damage](good)), Place(b"", good)]
    with running(trained) as scheduler:
        told = [Told(scheduler, Request("abc", sampling, max_tokens=20, start=start)) for start in starts]
        ends = [one.all()[-1] for one in told]
        assert ends[1].error is not None and ends[0].end == ends[2].end == "max_tokens"
        assert isinstance(ends[1].error, ApiError) or damage != "no finite values"
        assert scheduler.counts.failed == 1


@needs_native
@every_nth(2, pytest.mark.parametrize("form", ["ngram", "elu", "tables", "softmax", "elu that learns"]))
def test_the_session_at_the_end_goes_on_from_exactly_the_text(form: str) -> None:
    learn = form == "elu that learns"
    trained = replace(tiny(form.split()[0], native=True), learn=learn)
    start, options = trained.read("dcba" * 20), Sampling(seed=5, temperature=1.2)
    for stop in ((), ("cb",), ("bb", "ac")):
        generation = trained.generate(trained.read("abc", start), options, [(0,)], 60, stop)
        expected = "".join(piece for _, piece in generation)
        with running(trained) as scheduler:
            asked = Request("abc", options, 60, stop, Place(b"", start), learn, keep_session=True)
            told, others = Told(scheduler, asked), [Told(scheduler, request) for request in requests(3)]
            events = told.all()
            assert all(other.all()[-1].end for other in others)
        assert "".join(event.text for event in events) == expected
        turn = events[-1].turn
        assert turn is not None
        session = turn.read.after(trained.model, turn.written).session
        assert session is not None
        session = session._replace(unread=turn.unread)
        once_more = "".join(trained.stream("dd", state=session, seed=1))
        assert once_more == "".join(trained.stream("dd", state=generation.finished(), seed=1))
        assert session.total == generation.finished().total


def test_likelihoods_are_those_of_the_model() -> None:
    trained = tiny("delta")
    with running(trained) as scheduler:
        others = [Told(scheduler, request) for request in requests(3)]
        events = Told(scheduler, Request("abc", Sampling(seed=2), max_tokens=9, alternatives=3)).all()
        assert all(other.all()[-1].end for other in others)
    tokens = [event.token for event in events if event.token]
    assert len(tokens) == 9
    ids = torch.tensor([[256, *b"abc", *(told.token for told in tokens)]])
    with torch.inference_mode():
        expected = predict(trained.model, ids)[0][0, 3:-1].log_softmax(-1)
    for told, row in zip(tokens, expected, strict=True):
        assert told.log_probability == pytest.approx(float(row[told.token]), abs=1e-5)
        values, likeliest = row.topk(3)
        assert [one.token for one in told.alternatives] == likeliest.tolist()
        assert [one.log_probability for one in told.alternatives] == pytest.approx(values.tolist(), abs=1e-5)


def test_cached_states_learn_what_the_request_asks_for() -> None:
    trained, text = tiny("elu", native=True), "A line of unknown words: zyx qwv. " * 12
    plain, learning = (Request(text, Sampling(temperature=0), max_tokens=40, learn=learn) for learn in (False, True))
    expected = [written_alone(trained, request) for request in (plain, learning)]
    assert expected[0] != expected[1]
    with running(trained, memory=1 << 28) as scheduler:
        for asked, cached in ((plain, 0), (learning, 0), (plain, len(text)), (learning, 2 * len(text))):
            assert Told(scheduler, asked).text() == expected[asked.learn]
            assert scheduler.counts.cached_tokens == cached
        assert scheduler.states.bytes > 2 * state_bytes(trained.read(text, learn=True).state.learned)
