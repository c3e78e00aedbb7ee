"""States are found by the tokens that gave them, and change no text."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from models import FORMS
from serving.engines import Told, loaded, running, subwords, tiny
from torch import Tensor

from lmlong.data.tokenizers.base import Tokenizer
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.sampling import Sampling
from lmlong.inference.state_table import PIECE, Piece, Place, StateTable, pieces_of, superseded
from lmlong.model.state import state_bytes
from lmlong.serving.request import Request
from lmlong.serving.writer import KEPT_EVERY

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
    draw, texts = random.Random(0), ["".join(random.Random(seed).choices(WORDS, k=300))[:300] for seed in range(3)]
    prompts = [draw.choice(texts)[: draw.randint(0, 300)] for _ in range(24)]
    asked = [
        Request(prompt, Sampling(seed=seed % 3, temperature=1.0), max_tokens=draw.randint(1, 12))
        for seed, prompt in enumerate(prompts)
    ]
    written = []
    for memory in (0, MEMORY):
        with running(trained, rows=3, memory=memory) as engine:
            written.append([Told(engine, request).text() for request in asked])
    assert written[0] == written[1] and engine.counts.cached_tokens > 0.3 * engine.counts.prompt_tokens


def test_nothing_that_was_read_is_read_again() -> None:
    with running(tiny(), memory=MEMORY) as engine, counted(tiny()) as read:
        prompt = "abcd" * 100
        written = Told(engine, Request(prompt, Sampling(temperature=0), max_tokens=7)).text()
        assert sum(read) == 400 + 7
        read.clear()
        assert Told(engine, Request(prompt, Sampling(temperature=0), max_tokens=7)).text() == written
        assert read == [1] * 7
        read.clear()
        Told(engine, Request(prompt + written + "dd", Sampling(temperature=0), max_tokens=1)).text()
        assert sum(read) == 2 + 1  # what followed, and the first token of all that was read before
        read.clear()
        Told(engine, Request(prompt[:-1] + "x", max_tokens=1)).text()
        assert sum(read) == 400 + 1  # no beginning of it was kept


def test_long_prompts_are_kept_on_their_way() -> None:
    draw = random.Random(0)
    text = "".join(draw.choices("abcd", k=2 * KEPT_EVERY + 300))
    with running(tiny(), memory=MEMORY) as engine, counted(tiny()) as read:
        Told(engine, Request(text, max_tokens=1)).text()
        read.clear()
        Told(engine, Request(text[: 2 * KEPT_EVERY + 100] + "x", max_tokens=1)).text()
        assert sum(read) <= 2 * PIECE + 100


def test_session_that_begins_alike_is_found_on_disk(tmp_path: Path) -> None:
    trained, tokens = tiny(), [*range(PIECE), *range(44)]
    place = Place(StateTable(trained, 0).empty).after(trained.model, pieces_of("read", tokens))
    table = StateTable(trained, 0, tmp_path, MEMORY)
    table.save(place)
    found, pieces = StateTable(trained, 0, tmp_path, MEMORY).longest([*tokens], "read", steps=False)
    assert found.key == place.key and found.tokens == 300 and [len(piece.tokens) for piece in pieces] == [PIECE, 44]


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
    assert [key in table for key in keys] == [True, False, False, True, True]
    small = StateTable(tiny(), 10)
    small.put(Place(keys[0], session))
    assert small.bytes == 0 and small.get(keys[0]) is None


def place(key: bytes, tokens: int) -> Place:
    return Place(key, tiny().read("a")._replace(total=torch.tensor([tokens])))


def test_longest_beginning_is_found_and_no_other_kind() -> None:
    table, draw = StateTable(tiny(), 1 << 30), random.Random(0)
    known = {(): table.empty}
    for _ in range(60):
        before = draw.choice([*known])
        piece = Piece("read", tuple(draw.choices((1, 2), k=draw.randint(1, 4))))
        if before + piece.tokens not in known:
            known[before + piece.tokens] = piece.key(known[before])
            table.put(place(known[before + piece.tokens], len(before + piece.tokens)), known[before], piece)
    learned = Piece("learn", (1, 1))
    table.put(place(learned.key(table.empty), 2), table.empty, learned)
    for _ in range(300):
        tokens = tuple(draw.choices((1, 2), k=draw.randint(0, 12)))
        best = max((length for length in range(len(tokens) + 1) if tokens[:length] in known), default=0)
        found, pieces = table.longest(tokens, "read", steps=True)
        assert found.key == known[tokens[:best]] and sum(len(piece.tokens) for piece in pieces) == best


def test_states_are_found_after_those_on_their_way_were_dropped() -> None:
    table = StateTable(tiny(), 1 << 30)
    pieces = [Piece("read", (1, 2)), Piece("step", (3,)), Piece("read", (4,))]
    keys = [table.empty]
    for piece in pieces:
        keys.append(piece.key(keys[-1]))
        table.put(place(keys[-1], piece.tokens[-1]), keys[-2], piece)
    table.forget(keys[2])
    table.forget(keys[1])
    assert table.longest([1, 2, 3, 4, 5], "read", steps=True) == (Place(keys[3], table.get(keys[3])), pieces)
    assert table.longest([1, 2, 3, 5, 4], "read", steps=True)[1] == []


def test_own_steps_are_found_only_where_asked_for() -> None:
    table, steps = StateTable(tiny(), 1 << 30), Piece("step", (1, 2))
    table.put(place(steps.key(table.empty), 2), table.empty, steps)
    assert table.longest([1, 2, 3], "read", steps=True)[1] == [steps]
    assert table.longest([1, 2, 3], "read", steps=False)[1] == []


def test_superseded_states_leave_doubling_distances() -> None:
    kept: list[int] = []
    for end in range(0, 100_000, 300):
        kept = [position for position in [*kept, end] if position not in superseded([*kept, end], end)]
        distances = [end - position for position in reversed(kept)]
        assert distances[0] == 0 and all(far <= 4 * max(near, 300) for near, far in pairwise(distances))
    assert len(kept) < 14
