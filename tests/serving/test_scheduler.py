"""Requests side by side: each is written what it would be alone, and none waits for another."""

import math
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
from lmlong.inference.state_table import Place, StateTable
from lmlong.model.state import rebuild_state
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
        )
        for number in range(count)
    ]


def written_alone(trained: TrainedLanguageModel, request: Request) -> str:
    options = {name: getattr(request.sampling, name) for name in request.sampling.__dataclass_fields__}
    return "".join(trained.stream(request.prompt, max_tokens=request.max_tokens, stop=request.stop, **options))


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=needs_native)])
@pytest.mark.parametrize("wrong", [{"recent": (10**6,)}, {"recent": (-2, 97)}], ids=str)
def test_a_row_that_cannot_be_written_fails_alone(wrong: dict[str, tuple[int, ...]], native: bool) -> None:
    """Files are checked before they become sessions; a row must not end others even if such a check fails."""
    trained, sampling = tiny(native=native), Sampling(temperature=1.0, repetition_penalty=1.2)
    bad = trained.read("abc")._replace(**wrong)
    with running(trained) as scheduler:
        good = Told(scheduler, Request("abcab", sampling, max_tokens=40))
        failing = Told(scheduler, Request("", sampling, max_tokens=40, start=Place(b"", bad)))
        assert failing.all()[-1].error is not None
        assert good.all()[-1].error is None
        assert scheduler.counts.failed == 1


@needs_native
@every_nth(2, pytest.mark.parametrize("form", ["ngram", "softmax", "window beside delta", "elu"]))
def test_each_is_written_what_it_would_be_alone(form: str) -> None:
    trained, asked = tiny(form, native=True), requests(13)
    expected = [written_alone(trained, request) for request in asked]
    for rows in (1, 4, 64):
        with running(trained, rows=rows) as scheduler:
            told = [Told(scheduler, request) for request in asked]
            assert [one.text() for one in told] == expected
        assert all(one.none_are_left() for one in told) and scheduler.active == scheduler.queued == 0
    assert len(set(expected)) > 10


@pytest.mark.parametrize("tokenizer", [None, subwords()], ids=["bytes", "subwords"])
def test_by_torch_and_with_prompts_that_end_within_a_word(tokenizer: Tokenizer | None) -> None:
    trained, asked = tiny("delta", tokenizer=tokenizer), requests(6)
    with running(trained, rows=3) as scheduler:
        told = [Told(scheduler, request) for request in asked]
        assert [one.text() for one in told] == [written_alone(trained, request) for request in asked]


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


def test_a_broken_state_ends_its_own_request_alone() -> None:
    good = tiny().read("abc")
    bad = good._replace(state=rebuild_state(good.state, iter([x * math.nan for x in state_tensors(good.state)])))
    bad = bad._replace(state=bad.state._replace(position=good.state.position))
    with running(tiny()) as scheduler:
        told = [Told(scheduler, Request("abc", start=Place(b"", start), max_tokens=20)) for start in (good, bad)]
        told.append(Told(scheduler, Request("abc", max_tokens=20)))
        ends = [one.all()[-1] for one in told]
        assert isinstance(ends[1].error, ApiError) and ends[0].end == ends[2].end == "max_tokens"
        assert scheduler.counts.failed == 1


@needs_native
@every_nth(2, pytest.mark.parametrize("form", ["ngram", "elu", "tables", "softmax"]))
def test_the_session_at_the_end_goes_on_from_exactly_the_text(form: str) -> None:
    trained = tiny(form, native=True)
    start, options = trained.read("dcba" * 20), Sampling(seed=5, temperature=1.2)
    for stop in ((), ("cb",), ("bb", "ac")):
        generation = trained.generate(trained.read("abc", start), options, [(0,)], 60, stop)
        expected = "".join(piece for _, piece in generation)
        with running(trained) as scheduler:
            asked = Request("abc", options, 60, stop, Place(b"", start), keep_session=True)
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
