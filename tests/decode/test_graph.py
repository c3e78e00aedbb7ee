"""A decode step whose operations are recorded once gives what the model's step gives, and changes no other state."""

import copy
from typing import Any

import pytest
import torch
from decode.test_rows import SOME_LEARN, check_rows
from machine import needs_compiler
from model.shapes import SHAPES, shaped
from models import model_of, text
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lmlong.attention.base import state_tensors
from lmlong.attention.device_policy import GPU_POLICY, use_policy
from lmlong.decode import graph
from lmlong.decode.engine import rows_of
from lmlong.decode.graph import GraphEngine, Outputs, Run, cuda_graph
from lmlong.model.language_model import LanguageModel
from lmlong.model.state import concat_states
from lmlong.recipe import Attention, Ngram

BUCKETS = 3000


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


def in_float64(shape: dict[str, Any]) -> LanguageModel:
    model = shaped(shape, deviation=0.3).double()
    model.set_state_dtype(torch.float64)
    return model


RECORDED = {
    name: SHAPES[name]
    for name in (
        *("elu", "channel", "favor", "taylor", "delta", "window", "sink", "window beside", "sink beside delta"),
        *("tables", "mean of blocks", "hourglass"),
    )
}
"""Models whose states do not grow."""
every_recorded = pytest.mark.parametrize("shape", RECORDED.values(), ids=RECORDED)


@every_recorded
@torch.inference_mode()
def test_a_recorded_step_is_the_step_and_changes_no_other_state(shape: dict[str, Any]) -> None:
    check_rows(GraphEngine(in_float64(shape), record), 1e-10, steps=24)


@torch.inference_mode()
def test_rows_that_learn_and_rows_that_do_not_step_together() -> None:
    model = copy.deepcopy(model_of("tables"))
    use_policy(model, GPU_POLICY)  # a graph has operations of torch alone
    check_rows(GraphEngine(model, record), 1e-5, SOME_LEARN, steps=40)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", ["elu", "delta", "window beside", "tables"])
@torch.inference_mode()
def test_a_compiled_step_is_the_step(name: str) -> None:
    model = in_float64(RECORDED[name])
    model.step_is_compiled = True
    torch._dynamo.reset()
    check_rows(GraphEngine(model, lambda run: run), 1e-10)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.gpu
@every_recorded
@pytest.mark.parametrize("compiles", [False, True])
@torch.inference_mode()
def test_a_cuda_graph_is_the_step_and_changes_no_other_state(shape: dict[str, Any], compiles: bool) -> None:
    model = in_float64(shape).cuda()
    model.step_is_compiled = compiles
    check_rows(GraphEngine(model, cuda_graph), 1e-10)


@torch.inference_mode()
def test_layers_that_read_blocks_have_a_graph_for_each_phase() -> None:
    model, tokens = in_float64(SHAPES["mean of blocks"]), text(2, 40)
    TAPES.clear()
    engine = GraphEngine(model, record)
    for read in ([6, 6], [1, 6]):  # rows that complete blocks together, and apart
        state = concat_states([model(row[None, :count])[1] for row, count in zip(tokens, read, strict=True)])
        rows = rows_of(engine, state)
        for token in tokens[:, 20:32].mT:
            engine.step(rows, token.tolist())
    assert len(TAPES) <= 4


@torch.inference_mode()
def test_a_table_is_written_where_it_is() -> None:
    model, tokens = in_float64({"attention": Attention(kind="ngram", ngram=Ngram(buckets=BUCKETS))}), text(1, 30)
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
    model = in_float64({})
    engine = GraphEngine(model, record)
    rows = {size: rows_of(engine, model.init_state(size)) for size in (1, 2, 3)}
    TAPES.clear()
    for size in (1, 2, 1, 3, 1, 2):  # 2 is replaced by 3, since 1 was used later
        engine.step(rows[size], [97] * size)
    assert len(TAPES) == 4


@torch.inference_mode()
def test_a_bfloat16_state_keeps_only_its_cache_in_bfloat16() -> None:
    """A prompt may be read in bfloat16, while steps compute in float32."""
    model = shaped({"attention": Attention(kind="window", window=5)})
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
