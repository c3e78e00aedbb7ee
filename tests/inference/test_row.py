"""Turns of rows: what the engine does for them, and that an error or an interrupt of one affects no other."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.decode.engine import EagerEngine, Pass
from lmlong.inference.generation import Generation
from lmlong.inference.loading import load
from lmlong.inference.row import Row, advance
from lmlong.inference.session import prefill
from lmlong.model.finite import NotFinite
from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.model.sampling_options import Sampling

from .conftest import prose

ModelOf = Callable[[str], LanguageModel]

BYTES = ByteTokenizer()
PROMPTS = [[BYTES.bos, *BYTES.encode(text)] for text in ("to be", "or not to be", "that is the question")]


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
    sessions = [prefill(model, [prompt]) for prompt in PROMPTS]
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
    row = Row(EagerEngine(model), BYTES, prefill(model, [PROMPTS[0]]), Sampling(temperature=0))
    row.head = b" "
    (drawn,) = advance(EagerEngine(model), [row])
    assert isinstance(drawn.error, NotFinite) and drawn.token is None


def test_row_that_fails_takes_no_random_numbers_of_others(model_of: ModelOf) -> None:
    model = model_of("linear")
    engine = EagerEngine(model)

    def rows(count: int) -> list[Row]:
        all_options = [Sampling(seed=5, temperature=1.5, loop_penalty=9), Sampling(repetition_penalty=1.2)]
        return [Row(engine, BYTES, prefill(model, [PROMPTS[0]]), options) for options in all_options[:count]]

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
    sessions = [prefill(model, [prompt]) for prompt in PROMPTS]
    model.engine = Interrupted(model)
    with pytest.raises(KeyboardInterrupt):
        list(Generation(model, BYTES, sessions, Sampling(), [(number,) for number in range(3)], 20))
