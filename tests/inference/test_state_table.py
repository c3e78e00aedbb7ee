"""States are found by the tokens that gave them, and change no text."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from models import FORMS
from serving.schedulers import Told, loaded, running, subwords, tiny
from torch import Tensor

from lmlong.data.tokenizers.base import Tokenizer
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.sampling import Sampling
from lmlong.inference.state_table import PIECE, Piece, Place, StateTable, pieces_of, superseded
from lmlong.model.state import state_bytes
from lmlong.serving.request import Request

MEMORY = 1 << 28
WORDS = ["a", "b", "cab ", "abacad", "\n", "dab, "]


@contextmanager
def counted(trained: TrainedLanguageModel) -> Iterator[list[int]]:
    """Numbers of tokens that the model reads at once."""
    read: list[int] = []

    def count(module: object, inputs: tuple[Tensor, ...]) -> None:
        read.append(inputs[0].shape[1])

    hook = trained.model.blocks[0].register_forward_pre_hook(count)
    yield read
    hook.remove()


@pytest.mark.parametrize(("form", "tokenizer"), [("elu", None), ("delta", subwords()), ("tables", None)])
def test_prompts_cut_from_each_other_are_continued_alike(
    tmp_path: Path, form: str, tokenizer: Tokenizer | None
) -> None:
    trained = loaded(tmp_path / "run", native=False, tokenizer=tokenizer, **FORMS[form])
    trained.model.double()  # so that rounding decides nothing
    draw, texts = random.Random(0), ["".join(random.Random(seed).choices(WORDS, k=900))[:900] for seed in range(3)]
    prompts = [draw.choice(texts)[: draw.randint(0, 900)] for _ in range(24)]
    asked = [
        Request(prompt, Sampling(seed=seed % 3, temperature=1.0), max_tokens=draw.randint(1, 12))
        for seed, prompt in enumerate(prompts)
    ]
    written = []
    for memory in (0, MEMORY):
        with running(trained, rows=3, memory=memory) as scheduler:
            written.append([Told(scheduler, request).text() for request in asked])
    assert written[0] == written[1] and scheduler.counts.cached_tokens > 0.1 * scheduler.counts.prompt_tokens


def test_nothing_that_was_read_is_read_again() -> None:
    with running(tiny(), memory=MEMORY) as scheduler, counted(tiny()) as read:
        prompt = "abcd" * 150
        written = Told(scheduler, Request(prompt, Sampling(temperature=0), max_tokens=7)).text()
        assert sum(read) == 600 + 7
        read.clear()
        assert Told(scheduler, Request(prompt, Sampling(temperature=0), max_tokens=7)).text() == written
        assert read == [1] * 7
        read.clear()
        Told(scheduler, Request(prompt[:-1] + "x", max_tokens=1)).text()
        assert sum(read) == 601 - 2 * PIECE + 1  # what follows the last whole piece, and a step
        read.clear()
        Told(scheduler, Request("x" + prompt[1:], max_tokens=1)).text()
        assert sum(read) == 600 + 1


def test_states_of_long_prompts_are_kept_on_the_way() -> None:
    draw = random.Random(0)
    text = "".join(draw.choices("abcd", k=40 * PIECE))
    with running(tiny(), memory=MEMORY) as scheduler, counted(tiny()) as read:
        Told(scheduler, Request(text, max_tokens=1)).text()
        assert scheduler.states.bytes < 10 * state_bytes(tiny().read("a"))
        for shared in (30, 38):
            read.clear()
            Told(scheduler, Request(text[: shared * PIECE] + "x", max_tokens=1)).text()
            assert sum(read) <= (3 * (40 - shared) + 1) * PIECE


def test_session_that_begins_alike_is_found_on_disk(tmp_path: Path) -> None:
    trained, tokens = tiny(), [*range(PIECE), *range(44)]
    place = Place(StateTable(trained, 0).empty).after(trained.model, pieces_of("read", tokens))
    table = StateTable(trained, 0, tmp_path, MEMORY)
    table.save(place)
    table = StateTable(trained, 0, tmp_path, MEMORY)
    found, number = table.nearest(
        Place(table.empty), pieces_of("read", [*tokens, 7])[:1] + pieces_of("read", tokens)[1:]
    )
    assert found.key == place.key and found.tokens == 300 and number == 2


def test_memory_is_bounded_and_holds_the_latest_used() -> None:
    session = tiny().read("abc")
    table = StateTable(tiny(), 3 * state_bytes(session))
    keys = [Piece("read", (number,)).key(table.empty) for number in range(5)]
    for key in keys[:3]:
        table.put(Place(key, session))
    assert table.get(keys[0]) is not None
    for key in keys[3:]:
        table.put(Place(key, session))
    assert table.bytes == 3 * state_bytes(session)
    assert [table.get(key) is not None for key in keys] == [True, False, False, True, True]
    small = StateTable(tiny(), 10)
    small.put(Place(keys[0], session))
    assert small.bytes == 0 and small.get(keys[0]) is None


def test_nearest_state_is_that_of_the_same_pieces() -> None:
    table, session = StateTable(tiny(), 1 << 30), tiny().read("a")
    start, pieces = Place(table.empty), [Piece("read", (1, 2)), Piece("wrote", (3,)), Piece("read", (4, 5))]
    assert table.nearest(start, pieces) == (start, 0)
    places, key = [start], table.empty
    for piece, tokens in zip(pieces, (2, 3, 5), strict=True):
        key = piece.key(key)
        places.append(Place(key, session._replace(total=tokens)))
    for number in (2, 1):
        table.put(places[number])
    assert table.nearest(start, pieces)[1] == 2 and table.nearest(places[2], pieces[2:]) == (places[2], 0)
    table.forget(places[2].key)
    assert table.nearest(start, pieces)[1] == 1
    others = ([Piece("learn", (1, 2))], [Piece("read", (1,)), Piece("read", (2,))], [Piece("read", (1, 3))])
    assert all(table.nearest(start, other) == (start, 0) for other in others)
    table.put(Place(places[1].key, session._replace(total=3)))  # of another text
    assert table.nearest(start, pieces) == (start, 0)


@pytest.mark.parametrize("apart", [0, 1024])
def test_superseded_states_leave_doubling_distances(apart: int) -> None:
    kept: list[int] = []
    for end in range(0, 100_000, 300):
        kept = [position for position in [*kept, end] if position not in superseded([*kept, end], end, apart)]
        distances = [end - position for position in reversed(kept)]
        assert distances[0] == 0 and all(far <= 4 * max(near, 300 + apart) for near, far in pairwise(distances))
        assert all(far - near >= apart for near, far in pairwise(distances[1:]))
        assert end > apart or len(kept) == 1 or not apart
    assert len(kept) < 14
