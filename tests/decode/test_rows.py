"""Rows that come and go, and several tokens of a row in one pass, give what single steps of each row give."""

from random import Random
from typing import Any, get_args

import pytest
import torch
from decode.rows import apart, check_rows
from decode.test_graph import record
from decode.test_native import SHAPES, compiled, shaped
from grids import thinned
from machine import needs_native
from models import FORMS, model_of, stirred, text

from lmlong.attention.base import state_tensors
from lmlong.decode.choice import fast_engine
from lmlong.decode.engine import EagerEngine, engine_of, step
from lmlong.decode.graph import GraphEngine
from lmlong.decode.native import NativeEngine
from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.model.learning import read as reading
from lmlong.model.quantization import WeightFormat
from lmlong.native.state import map_state
from lmlong.recipe import Downsample, Model


def native(form: str) -> LanguageModel:
    model = hourglass() if form == "hourglass" else model_of(form)
    model.engine = fast_engine(model, tried=False)
    return model


def hourglass() -> LanguageModel:
    options = Model(width=16, layers=3, heads=2, downsample=Downsample(factor=2))
    return stirred(LanguageModel(options, 258), 0.3).eval()


@needs_native
@pytest.mark.parametrize("form", [*FORMS, "hourglass"])
@torch.inference_mode()
def test_native_rows_are_those_of_each_alone_to_the_bit(form: str) -> None:
    engine = engine_of(native(form))
    assert isinstance(engine, NativeEngine)
    check_rows(engine, 0)


@pytest.mark.parametrize("form", ["elu", "ngram", "tables of single tokens", "softmax", "window beside", "hourglass"])
@torch.inference_mode()
def test_rows_by_torch_are_those_of_each_alone(form: str) -> None:
    check_rows(EagerEngine(hourglass() if form == "hourglass" else model_of(form)), 1e-5)


@pytest.mark.parametrize("form", ["delta", "ngram", "tables", "hourglass"])
@torch.inference_mode()
def test_rows_by_a_recorded_graph_are_those_of_each_alone(form: str) -> None:
    model = (hourglass() if form == "hourglass" else model_of(form)).double()
    model.set_state_dtype(torch.float64)
    check_rows(GraphEngine(model, record), 1e-10)


@pytest.mark.parametrize("name", [pytest.param("native", marks=needs_native), "torch", "graph"])
@torch.inference_mode()
def test_rows_that_learn_and_rows_that_do_not_step_together(name: str) -> None:
    model = native("tables") if name == "native" else model_of("tables")
    engine = GraphEngine(model, record) if name == "graph" else engine_of(model)
    check_rows(engine, 0 if name == "native" else 1e-5, (True, False, False, True, False))


@torch.inference_mode()
def test_a_row_that_cannot_learn_leaves_all_rows_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is learned from takes memory, which may be missing; the engine then steps each row alone."""
    model, ids = model_of("elu"), text(2, 40)
    engine = EagerEngine(model)
    begun = reading.first_state(model, 1, learn=True)
    states = [reading.read(model, ids[row : row + 1, :16], begun)[1] for row in range(2)]
    rows = [engine.load(state) for state in states]
    weight = model.lm_head.matrix
    with monkeypatch.context() as missing:
        missing.setattr(model.lm_head, "matrix", lambda dtype: weight(dtype)[1:])  # of another size
        with pytest.raises(RuntimeError):
            engine.step(rows, ids[:, 16].tolist())
    found = engine.step(rows, ids[:, 16].tolist())
    for row in range(2):
        expected, _ = step(model, ids[row, 16:17], states[row])
        assert apart(found[row], expected[0]) < 1e-5


def assert_passes_equal_steps(model: LanguageModel, tokens: list[int], state: ModelState, threads: int = 1) -> None:
    """Compare all logits, hidden states and states after `tokens`, read in passes of 1 to 9 tokens, of which sometimes
    only a part is kept."""
    engine, read, size = engine_of(model), 0, 0
    row, single = engine.load(state), engine.load(state)
    torch.set_num_threads(threads)
    try:
        while read < len(tokens):
            size = size % 9 + 1
            ahead = engine.read([row], [tokens[read : read + size]])
            (known,) = ahead.tokens
            assert 1 <= len(known) <= size and known == tokens[read : read + len(known)]
            kept = max(1, len(known) - read % 3)
            for index, token in enumerate(known[:kept]):
                alone = engine.read([single], [[token]])
                engine.advance(single, 1)
                found = (ahead.logits[:, index], ahead.hidden[:, index], engine.save(row, index + 1))
                assert_equal_bits(found, (alone.logits[:, 0], alone.hidden[:, 0], engine.save(single)))
            engine.advance(row, kept)
            read += kept
    finally:
        torch.set_num_threads(1)


def assert_equal_bits(state: Any, other: Any) -> None:
    pairs = zip(state_tensors(state), state_tensors(other), strict=True)
    assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


@needs_native
@thinned(pytest.mark.parametrize("form", FORMS), pytest.mark.parametrize("threads", [1, 3]))
@torch.inference_mode()
def test_a_pass_gives_the_bits_of_single_steps(form: str, threads: int) -> None:
    """The text is longer than the lists of recent n-grams and a block of recent keys."""
    model, ids = native(form), text(1, 150)
    assert_passes_equal_steps(model, ids[0, 7:].tolist(), model(ids[:, :7])[1], threads)


@needs_native
@thinned(
    pytest.mark.parametrize("shape", SHAPES[::3], ids=str),
    pytest.mark.parametrize("kept", get_args(WeightFormat)),
)
@torch.inference_mode()
def test_a_pass_with_quantized_weights_gives_the_bits_of_steps(shape: dict[str, Any], kept: WeightFormat) -> None:
    model = compiled(shaped(shape, kept))
    assert_passes_equal_steps(model, (text(1, 40)[0] % 20).tolist(), model.init_state(1))


@needs_native
@torch.inference_mode()
def test_states_that_passes_gave_away_stay_as_they_are() -> None:
    model, ids = native("tables"), text(1, 200)
    engine, given = engine_of(model), [model(ids[:, :7])[1]]
    row, draw, read = engine.load(given[0]), Random(0), 7
    copied = [map_state(torch.clone, given[0])]
    while read < 190:
        (known,) = engine.read([row], [ids[0, read : read + draw.randint(1, 9)].tolist()]).tokens
        for count in range(len(known) + 1):
            if draw.random() < 0.2:
                given.append(engine.save(row, count))
                copied.append(map_state(torch.clone, given[-1]))
        kept = draw.randint(1, len(known))
        engine.advance(row, kept)
        read += kept
    for state, copy in zip(given, copied, strict=True):
        assert_equal_bits(state, copy)
