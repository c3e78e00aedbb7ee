"""Counts of the operations and the memory of one layer of the recipe `medium`, computed in the form for a GPU."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, NamedTuple
from warnings import filterwarnings

import torch
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from gpu_ready_parts.watch import WAITS, Watch
from lmlong.attention.device_policy import GPU_POLICY, use_policy
from lmlong.model.language_model import LanguageModel
from lmlong.model.stretch import BlockPhase
from lmlong.recipe import Recipe
from lmlong.report.table import Column, format_table

VOCABULARY = 32768
"""That of the recipe."""

LENGTHS = (4096, 16384, 65536)

GROWTH = 1.5
"""Operations for the longest text, at most, as a multiple of those for the shortest."""

TEMPORARY = 2e9
"""Bytes that a pass over the longest text may hold, beyond what is kept from the forward to the backward pass."""


class Kind(NamedTuple):
    """A kind of attention, as options of the recipe, and the kernel that computes it."""

    options: dict[str, Any]
    kernel: str = "torch"
    limit: int | None = None  # operations of a training step: of one layer and of one piece of the loss


KINDS = {
    "linear": Kind({"attention.kind": "linear"}, limit=800),
    "linear by Triton": Kind({"attention.kind": "linear"}, "triton", limit=400),
    "no decay": Kind({"attention.kind": "linear", "attention.decay": "none"}),
    "by channel": Kind({"attention.kind": "linear", "attention.decay": "channel"}),
    "FAVOR+": Kind({"attention.kind": "linear", "attention.feature_map": "favor"}),
    "delta": Kind({"attention.kind": "delta"}, limit=3000),
    "window": Kind({"attention.kind": "window"}),
    "parallel window": Kind({"attention.kind": "linear", "attention.parallel_window": 64}),
    "softmax": Kind({"attention.kind": "softmax"}),
    "ngram": Kind({"attention.kind": "ngram"}),
    "downsampled": Kind({"attention.kind": "linear", "layers": 3, "downsample.factor": 4}),  # the middle layer
}
if find_spec("fla"):
    filterwarnings("ignore", "Triton is not supported on current platform")  # no GPU, when it is imported
    KINDS |= {
        "delta by fla": Kind({"attention.kind": "delta"}, "fla", limit=400),
        "channel by fla": Kind({"attention.kind": "linear", "attention.decay": "channel"}, "fla", limit=400),
    }


class Pass(NamedTuple):
    """What a pass over a text launches and holds; or the operation at which it waits."""

    operations: int = 0
    names: Mapping[str, int] = MappingProxyType({})  # the number of each operation
    temporary: int = 0  # bytes, beyond those kept for the backward pass
    kept: int = 0  # bytes kept for the backward pass
    failure: str | None = None


class Row(NamedTuple):
    """The passes of a kind with or without document starts, for each length."""

    kind: str
    starts: bool
    train: list[Pass]
    prefill: list[Pass]
    decode: Pass


def check(
    kinds: Iterable[str] = tuple(KINDS), lengths: Sequence[int] = LENGTHS, width: int | None = None
) -> tuple[list[Row], list[Pass], list[str]]:
    """Return the passes of some kinds, the passes of the loss alone, and what is not as it should be. `width` replaces
    that of the recipe."""
    loss = [loss_pass(length, width) for length in lengths]
    rows = [row(kind, starts, lengths, width) for kind in kinds for starts in (False, True)]
    return rows, loss, [failure for one in rows for failure in failures(one, loss[0], lengths)]


def row(kind: str, starts: bool, lengths: Sequence[int], width: int | None) -> Row:
    train = [layer_pass(kind, length, starts, width, trains=True) for length in lengths]
    prefill = [layer_pass(kind, length, starts, width, trains=False) for length in lengths]
    return Row(kind, starts, train, prefill, decode_pass(kind, lengths[0], width))


@lru_cache(maxsize=1)
def build(kind: str, width: int | None) -> LanguageModel:
    """Return a model of one layer."""
    options = {"layers": 1, **KINDS[kind].options, **({} if width is None else {"width": width, "heads": width // 64})}
    recipe = Recipe.load("medium", {f"model.{name}": value for name, value in options.items()})
    model = LanguageModel(recipe.model, VOCABULARY)
    use_policy(model, GPU_POLICY)
    model.use_kernel(KINDS[kind].kernel)
    return model


def layer_pass(kind: str, length: int, starts: bool, width: int | None, trains: bool) -> Pass:
    """Return what a text takes from its tokens to the last hidden states, and back."""

    def work(model: LanguageModel, watch: Watch) -> int:
        tokens = torch.zeros(1, length, dtype=torch.long)
        document_starts = torch.zeros(1, length, dtype=torch.bool) if starts else None
        with watch, torch.set_grad_enabled(trains):
            hidden = bf16(lambda: model(tokens, None, document_starts)[0])
            kept = watch.now
            if trains:
                hidden.backward(torch.zeros_like(hidden))
        return kept

    return watched(build(kind, width), work)


def loss_pass(length: int, width: int | None) -> Pass:
    """Return what the loss takes, from the last hidden states to their gradient."""

    def work(model: LanguageModel, watch: Watch) -> int:
        hidden = torch.zeros(1, length, model.embedding.embedding_dim, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.zeros(1, length, dtype=torch.long)
        with watch:
            loss = bf16(lambda: model.loss(hidden, targets))
            kept = watch.now
            loss.backward()
        return kept

    return watched(build("linear", width), work)


def decode_pass(kind: str, length: int, width: int | None) -> Pass:
    """Return what one token takes after `length` tokens, up to its logits."""

    def work(model: LanguageModel, watch: Watch) -> int:
        with torch.no_grad():
            phase = BlockPhase(1, 0, even=False, fresh=True) if model.hourglass else None
            _, state = bf16(lambda: model(torch.zeros(1, length, dtype=torch.long)))
            with watch:
                bf16(lambda: model.decode_step(torch.zeros(1, dtype=torch.long), state, phase))
        return watch.now

    return watched(build(kind, width), work)


def watched(model: LanguageModel, work: Callable[[LanguageModel, Watch], int]) -> Pass:
    """Return what some work launches; its result are the bytes that it keeps."""
    fakes, watch = FakeTensorMode(), Watch()
    with FakeCopyMode(fakes):
        model = copy.deepcopy(model)
    try:
        with fakes, watch.autotuned() if find_spec("triton") else nullcontext():
            kept = work(model, watch)
    except WAITS as wait:
        return Pass(failure=f"waits for {wait.func}")
    return Pass(watch.count, dict(watch.operations.most_common()), watch.peak - kept, kept)


def bf16(work: Callable[[], Any]) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return work()


def failures(row: Row, loss: Pass, lengths: Sequence[int]) -> list[str]:
    """Return what is not as it should be."""
    name = f"{row.kind}{' with document starts' if row.starts else ''}"
    waits = {f"{name}, {what}: {one.failure}" for what, one in passes(row) if one.failure}
    if waits:
        return sorted(waits)
    limit, found = KINDS[row.kind].limit, []
    first, last = row.train[0], row.train[-1]
    if limit and last.operations + loss.operations > limit:
        found.append(f"{name}: {last.operations + loss.operations:,} operations with the loss, more than {limit:,}")
    for what, (short, *_, long), head in (("training", row.train, loss.operations), ("prefill", row.prefill, 0)):
        if long.operations + head > GROWTH * (short.operations + head):
            found.append(f"{name}, {what}: {short.operations:,} operations grow to {long.operations:,}")
    if last.kept > 1.1 * first.kept * lengths[-1] / lengths[0]:
        found.append(f"{name}: {last.kept / 1e9:.1f} GB are kept, which grow faster than the text")
    if last.temporary > TEMPORARY:
        found.append(f"{name}, training: {last.temporary / 1e9:.1f} GB of temporary tensors")
    return found


def passes(row: Row) -> list[tuple[str, Pass]]:
    return [
        *(("training", one) for one in row.train),
        *(("prefill", one) for one in row.prefill),
        ("decode", row.decode),
    ]


def figures(row: Row) -> dict[str, Any]:
    return {"kind": row.kind, "starts": row.starts} | {
        name: [as_json(one) for what, one in passes(row) if what == name] for name in ("training", "prefill", "decode")
    }


def as_json(one: Pass) -> dict[str, Any]:
    return {**one._asdict(), "names": dict(one.names)}


def lines(rows: Sequence[Row], loss: Sequence[Pass], lengths: Sequence[int] = LENGTHS) -> list[str]:
    """Return a table of the operations of a training step for each length, of a prefill of the longest text and of one
    decoded token, and the GB that are kept and temporary in training."""

    def cell(one: Pass) -> Any:
        return "waits" if one.failure else one.operations

    def gb(one: Pass) -> list[Any]:
        return ["", ""] if one.failure else [one.kept / 1e9, one.temporary / 1e9]

    short = [f"{length // 1024}k" for length in lengths]
    columns = [Column("kind", 16, align="<"), Column("documents", 10), *(Column(s, 8, ",") for s in short)]
    columns += [Column(f"read {short[-1]}", 10, ","), Column("decode", 7, ","), Column("kept", 7, ".2f")]
    columns += [Column("temp.", 6, ".2f")]
    cells = [["loss", "", *map(cell, loss), "", "", *gb(loss[-1])]]
    for one in rows:
        known = [*map(cell, one.train), cell(one.prefill[-1]), cell(one.decode), *gb(one.train[-1])]
        cells.append([one.kind, "several" if one.starts else "one", *known])
    return format_table(columns, cells)
