"""A decode step whose operations are recorded once gives what the model's step gives, and changes no other state."""

from typing import Any

import pytest
import torch
from decode.rows import check_rows
from models import kinds, stirred, text
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lmlong.attention import laws
from lmlong.attention.base import state_tensors
from lmlong.decode import graph
from lmlong.decode.engine import rows_of
from lmlong.decode.graph import GraphEngine, Outputs, Run, cuda_graph
from lmlong.model.language_model import LanguageModel
from lmlong.model.state import concat_states
from lmlong.recipe import Attention, Downsample, Model

BUCKETS = 3000
CONSTANT = {name: options for name, options in kinds(70).items() if name != "softmax"}


class Tape(TorchDispatchMode):
    """The operations of a call, which can be repeated on the same tensors without running any other Python, as by a
    CUDA graph."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        done = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, done))
        return done

    def repeat(self, results: Outputs) -> Outputs:
        """Return what `results` are now."""
        now: dict[int, Tensor] = {}
        for function, args, kwargs, done in self.calls:
            args, kwargs = tree_map_only(Tensor, lambda x: now.get(id(x), x), (args, kwargs))
            outputs = zip(tree_leaves(done), tree_leaves(function(*args, **kwargs)), strict=True)
            now.update({id(old): new for old, new in outputs if isinstance(old, Tensor)})
        logits, hidden = results
        return now[id(logits)], now[id(hidden)]


TAPES: list[Tape] = []


def record(run: Run) -> Run:
    with Tape() as tape:
        results = run()
    TAPES.append(tape)
    return lambda: tape.repeat(results)


def build(options: dict[str, Any], **shape: Any) -> LanguageModel:
    attention = Attention(**{**options, "ngram": {"buckets": BUCKETS}})
    model = LanguageModel(Model(width=16, layers=2, heads=2, attention=attention, **shape), 258)
    model.set_state_dtype(torch.float64)
    return stirred(model, 0.3).double().eval()


@pytest.mark.parametrize("kind", CONSTANT)
@torch.inference_mode()
def test_a_recorded_step_is_the_step_and_changes_no_other_state(kind: str) -> None:
    check_rows(GraphEngine(build(CONSTANT[kind]), record), 1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", CONSTANT)
@torch.inference_mode()
def test_a_cuda_graph_is_the_step_and_changes_no_other_state(kind: str) -> None:
    check_rows(GraphEngine(build(CONSTANT[kind]).cuda(), cuda_graph), 1e-10)


@pytest.mark.parametrize("factor", [2, 3])
@torch.inference_mode()
def test_layers_that_read_blocks_have_a_graph_for_each_phase(factor: int) -> None:
    model, tokens = build({"kind": "linear"}, downsample=Downsample(factor=factor, layers=1)), text(2, 60)
    TAPES.clear()
    engine = GraphEngine(model, record)
    for read in ([6, 6], [1, 6]):  # rows that complete blocks together, and apart
        state = concat_states([model(row[None, :count])[1] for row, count in zip(tokens, read, strict=True)])
        rows = rows_of(engine, state)
        for token in tokens[:, 20:40].mT:
            expected, state = model.step(token, state)
            assert laws.error(engine.step(rows, token.tolist()), expected) < 1e-10
    assert len(TAPES) <= 4


@torch.inference_mode()
def test_a_table_is_written_where_it_is() -> None:
    model, tokens = build({"kind": "ngram"}), text(1, 30)
    TAPES.clear()
    engine = GraphEngine(model, record)
    row = engine.load(model.init_state(1))
    for token in tokens[0].tolist():
        engine.step([row], [token])
    state = engine.save(row)
    (tape,) = TAPES
    for _, args, _, done in tape.calls:
        given, made = ([x for x in tree_leaves(part) if isinstance(x, Tensor)] for part in (args, done))
        addresses = {x.untyped_storage().data_ptr() for x in given}
        assert all(x.numel() < BUCKETS or x.untyped_storage().data_ptr() in addresses for x in made)
    assert sum(int(x.any()) for x in state.blocks[0].attention[:3]) == 3


@torch.inference_mode()
def test_few_sizes_of_a_batch_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "MAX_BATCHES", 2)
    model = build({"kind": "linear"})
    engine = GraphEngine(model, record)
    rows = {size: rows_of(engine, model.init_state(size)) for size in (1, 2, 3)}
    TAPES.clear()
    for size in (1, 2, 1, 3, 1, 2):  # 2 is replaced by 3, since 1 was used later
        engine.step(rows[size], [97] * size)
    assert len(TAPES) == 4


@torch.inference_mode()
def test_a_bfloat16_state_keeps_only_its_cache_in_bfloat16() -> None:
    """A prompt may be read in bfloat16, while steps compute in float32."""
    model = build({"kind": "window", "window": 5}).float()
    tokens, given = text(1, 30), model.init_state(1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, given = model(tokens[:, :9], given)
    assert any(x.dtype == torch.bfloat16 for x in state_tensors(given))
    engine = GraphEngine(model, record)
    row = engine.load(given)
    for token in tokens[0, 9:].tolist():
        engine.step([row], [token])
    state = engine.save(row)
    cached = {id(x) for block in state.blocks for x in (block.attention.k, block.attention.v)}
    assert all((x.dtype == torch.bfloat16) == (id(x) in cached) for x in state_tensors(state))
