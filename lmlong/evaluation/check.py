"""The laws of causal attention, held against a trained model: in its own number format, on its own device.

How exact a format is differs from model to model, so it is measured: the naive form of the same model, a full matrix
of weights in each layer, is computed in the model's format and in float64, and four times their distance is allowed.
"""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmlong.attention import laws
from lmlong.attention.contract import CausalAttention
from lmlong.attention.laws import Inputs, Subject
from lmlong.evaluation.health import Denominators, denominators
from lmlong.evaluation.substitution import attentions_of, prefilled_by
from lmlong.inference.loading import Loaded
from lmlong.inference.state_size import size
from lmlong.model.compiled import compile_step
from lmlong.model.language_model import LanguageModel

LEAST_DENOMINATOR = 1e-20
"""Ten orders of magnitude above where denominators are clamped."""

FORMATS = {"32": torch.float32, "bf16": torch.bfloat16, "16": torch.float16}


class Verdict(NamedTuple):
    """One law and how it was kept."""

    law: str
    measured: float
    allowed: float

    @property
    def kept(self) -> bool:
        return self.measured <= self.allowed


class Report(NamedTuple):
    """All that was checked."""

    verdicts: list[Verdict]
    denominators: list[Denominators]
    precision: str
    rows: int
    tokens: int

    @property
    def kept(self) -> bool:
        return all(verdict.kept for verdict in self.verdicts)


@torch.no_grad()
def check(loaded: Loaded, tokens: Tensor, starts: Tensor) -> Report:
    """Hold every law against the model, over tokens (rows, time) in which `starts` marks the first of each document."""
    model, precision = loaded.model, loaded.recipe.training.precision
    with _step_by_torch(model):
        with _format(model, precision):
            health = denominators(model, tokens, starts)
            verdicts = [*_readings(model, precision, (tokens, starts)), *_state(model, tokens), *_scales(model)]
        if loaded.compiles_at_once:
            verdicts.append(_compiled(model, tokens))
    smallest = min((bucket.smallest for bucket in health), default=1.0)
    # a bound from above, like all others
    verdicts.append(
        Verdict("1 / smallest denominator", 1 / smallest if smallest > 0 else float("inf"), 1 / LEAST_DENOMINATOR)
    )
    return Report(verdicts, health, precision, *tokens.shape)


def _readings(model: LanguageModel, precision: str, text: Inputs) -> Iterator[Verdict]:
    """Laws about ways of reading the same text."""
    tokens, starts = text
    assert tokens is not None and starts is not None
    subject, time = _subject(model), tokens.shape[1]
    with torch.autocast(tokens.device.type, enabled=False):
        truth = _naive(copy.deepcopy(model).double(), text)
    # sums are in float32 whatever the format is, and in another order each way
    rounding = max(torch.finfo(FORMATS.get(precision, torch.float32)).eps, 4 * torch.finfo(torch.float32).eps)
    allowed = 4 * max(laws.error(_naive(model, text), truth), rounding)
    other = (tokens.roll(1, 0).flip(1), starts.flip(1))
    # rows that fill blocks at different times may lie side by side in more than one way, each as good: one row has one
    row = text if model.hourglass is None else (tokens[:1], starts[:1])
    prefilled, _ = subject.prefill(text, subject.init_state(len(tokens)))

    yield Verdict("prefill = definition in float64", laws.error(prefilled, truth), allowed)
    yield Verdict("step = prefill", laws.step_is_prefill(subject, row), allowed)
    yield Verdict("any cut = prefill", laws.cuts_change_nothing(subject, row, [1, time // 3, time // 2]), allowed)
    future = max(laws.future_leaves_past(subject, text, other, place) for place in (1, time // 3, time // 2, time - 1))
    yield Verdict("the future leaves the past", future, 0.0)
    yield Verdict("the state is not touched", laws.state_is_not_touched(subject, text), 0.0)
    yield Verdict("rows are alone", laws.rows_are_alone(subject, text, other), 0.0)
    begins = [0, time // 3, time // 3 + 1, time // 2]
    packed = torch.zeros_like(starts).index_fill(1, torch.tensor(begins, device=starts.device), True)
    alone = laws.packed_is_alone(subject, (tokens, packed), (tokens, None), begins)
    yield Verdict("packed documents are alone", alone, allowed)


def _state(model: LanguageModel, tokens: Tensor) -> Iterator[Verdict]:
    """Law 7: the state holds as many numbers as its attention declares."""
    read = [model.reads(layer, tokens.shape[1]) for layer in range(len(model.blocks))]
    pairs = zip(attentions_of(model), read, strict=True)
    declared = sum(attention.state_numbers(time) for attention, time in pairs)
    _, state = model.read(tokens[:1])
    held = sum(size(block.attention).numbers for block in state.blocks)
    yield Verdict("numbers in the state beyond those declared", float(abs(held - declared)), 0.0)


def _scales(model: LanguageModel) -> Iterator[Verdict]:
    """Law 8: queries and keys of any size the attention promises to bear give outputs that are finite and alive."""
    bad = 0
    for attention in {type(attention): attention for attention in attentions_of(model)}.values():
        for scale in (1e-4, 1e-2, 1.0, 1e2, 1e4):
            y = _random_output(attention, min(scale, attention.largest_scale), model.embedding.weight)
            bad += int((~y.isfinite()).sum()) + int((y.float().norm(dim=-1) == 0).sum())
    yield Verdict("outputs not finite or dead at scales 1e-4 to 1e4", float(bad), 0.0)


def _random_output(attention: CausalAttention, scale: float, like: Tensor) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    shape = (1, attention.heads, 300, attention.width)
    q, k, v = (torch.randn(shape, generator=draw).to(like) for _ in range(3))
    log_decay = torch.full(shape[:3], -0.01, device=like.device) if attention.gated else None
    return attention.prefill(
        q * scale, k * scale, v, attention.init_state(1, like.device, like.dtype), None, log_decay
    )[0]


def _subject(model: LanguageModel) -> Subject:
    """The model as the laws see it: (tokens, starts) to logits."""

    def prefill(x: Inputs, state: Any) -> tuple[Tensor, Any]:
        assert x[0] is not None
        return model.prefill(x[0], state, x[1])

    def step(x: Inputs, state: Any) -> tuple[Tensor, Any]:
        tokens, starts = x
        assert tokens is not None
        if starts is not None:  # a document that begins within a batch is read
            return model.prefill(tokens, state, starts)
        logits, state = model.step(tokens[:, 0], state)
        return logits[:, None], state

    return Subject(model.init_state, prefill, step)


def _compiled(model: LanguageModel, tokens: Tensor) -> Verdict:
    """The step that texts are written by, which computes in float32 whatever the model was trained in."""
    text = (tokens if model.hourglass is None else tokens[:1], None)
    truth = _naive(copy.deepcopy(model).double(), text)
    allowed = 4 * max(laws.error(_naive(model, text), truth), 4 * torch.finfo(torch.float32).eps)
    other = copy.copy(model)
    compile_step(other)
    by_tokens = Subject(model.init_state, _subject(model).prefill, _subject(other).step)
    return Verdict("compiled step = prefill, in float32", laws.step_is_prefill(by_tokens, text), allowed)


def _naive(model: LanguageModel, text: Inputs) -> Tensor:
    """The logits of a text by the definition of each layer's attention."""

    def by_definition(attention: CausalAttention, q: Tensor, k: Tensor, v: Tensor, state: Any, *rest: Any) -> Any:
        return attention.reference(q, k, v, *rest).to(v.dtype), state

    tokens, starts = text
    assert tokens is not None
    with prefilled_by(by_definition, attentions_of(model)):
        return model.prefill(tokens, None, starts)[0]


@contextmanager
def _step_by_torch(model: LanguageModel) -> Iterator[None]:
    """Without the compiled step that the model may have."""
    compiled = vars(model).pop("answer", None)
    try:
        yield
    finally:
        if compiled is not None:
            model.answer = compiled  # type: ignore[method-assign]


def _format(model: LanguageModel, precision: str) -> AbstractContextManager:
    """The number format the model was trained in."""
    dtype = FORMATS.get(precision, torch.float32)
    return torch.autocast(model.embedding.weight.device.type, dtype, enabled=dtype != torch.float32)
