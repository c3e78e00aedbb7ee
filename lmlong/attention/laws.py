"""The laws of causal attention, as functions that return an error: 0 for an exact law, else relative to the norm.

They apply to an attention and to a whole language model. In law 1 the definition is a quadratic form or a token loop,
and values and gradients must match. The scales of law 9 are scales of queries and keys. Law 12 is that of attentions
with an `effect`, which several processes can compute.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lmlong.attention.base import CausalAttention, state_tensors
from lmlong.attention.inputs import Inputs
from lmlong.native.state import map_state
from lmlong.report.json_values import json_keys

LAWS: Mapping[int, str] = {
    1: "forward = definition",
    2: "token by token = forward",
    3: "any cut = forward",
    4: "the future never changes the past",
    5: "a state is not modified",
    6: "rows are independent",
    7: "packed documents are independent",
    8: "the state is as large as declared",
    9: "outputs not finite or dead",
    10: "1 / smallest denominator",
    11: "fast decode step = forward, in float32",
    12: "parts read at once = forward",
}

SAME_TEXT = range(2, 8)
"""The laws that compare ways of computing the same text; `measure` measures them."""

EXACT = (4, 5, 6)
"""The laws that allow no rounding error."""

Text: TypeAlias = tuple[Tensor | None, ...]
"""Tensors over the same tokens: (batch, time), (batch, heads, time) or (batch, heads, time, dim)."""


DENOMINATOR_LIMIT = 1e-20
"""Ten orders of magnitude above the clamp of denominators."""

SCALES = (1e-4, 1e-2, 1.0, 1e2, 1e4)
"""Scales of queries and keys for law 9, up to the `largest_scale` of an attention."""


@json_keys("number", "law", "measured", "allowed", "kept")
class Verdict(NamedTuple):
    """The measured error of one law, and the allowed error."""

    number: int  # in LAWS
    law: str
    measured: float
    allowed: float

    @property
    def kept(self) -> bool:
        return self.measured <= self.allowed


class Subject(NamedTuple):
    """The interface through which the laws test an attention or a model."""

    init_state: Callable[[int], Any]  # batch -> state
    forward: Callable[[Text, Any], tuple[Tensor, Any]]  # of any number of tokens
    step: Callable[[Text, Any], tuple[Tensor, Any]]  # of one token
    settle: Callable[[Any], Any] = lambda state: state  # converts a state to the form that a prefill returns


def of_attention(attention: CausalAttention, like: Tensor) -> Subject:
    """Return an attention as a subject on (q, k, v, document_starts, *declared inputs), in the dtype and device of
    `like`."""

    def forward(text: Text, state: Any) -> tuple[Tensor, Any]:
        q, k, v, document_starts, inputs = arguments(attention, text)
        return attention(q, k, v, state, document_starts, inputs)

    def step(text: Text, state: Any) -> tuple[Tensor, Any]:
        q, k, v, document_starts, *rest = text
        # a model decodes without document starts unless a document begins
        starts = document_starts if document_starts is not None and document_starts.any() else None
        return forward((q, k, v, starts, *rest), state)

    return Subject(lambda batch: attention.init_state(batch, like.device, like.dtype), forward, step, attention.settle)


def reference(attention: CausalAttention, text: Text) -> Tensor:
    """Return the outputs by the definition, for law 1."""
    return attention.reference(*arguments(attention, text))


def arguments(attention: CausalAttention, text: Text) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Inputs]:
    """Return q, k, v, document_starts and the inputs by their names."""
    q, k, v, document_starts, *rest = text
    assert q is not None and k is not None and v is not None
    inputs = {name: x for name, x in zip(attention.inputs, rest, strict=True) if x is not None}
    return q, k, v, document_starts, inputs


class Case(NamedTuple):
    """A subject, and texts of the same shape, on which the laws of SAME_TEXT are measured."""

    subject: Subject
    text: Text
    other: Text
    packed: Text
    """Each row is packed from documents that begin at `begins`."""
    begins: Sequence[int]
    cuts: Sequence[int]
    starts: int
    """The index of the document starts in a text."""


def measure(number: int, case: Case) -> float:
    """Return the error of a law of SAME_TEXT."""
    subject, text, other, packed, begins, cuts, starts = case
    match number:
        case 2:
            return steps_equal_forward(subject, text)
        case 3:
            return cuts_change_nothing(subject, text, cuts)
        case 4:
            return max(future_leaves_past(subject, text, other, position) for position in cuts)
        case 5:
            return max(state_is_not_modified(subject, x) for x in (text, _without(starts, text)))
        case 6:
            return rows_are_independent(subject, text, other)
        case 7:
            return documents_are_independent(subject, packed, _without(starts, packed), begins)
    raise ValueError(f"law {number} is not one of {SAME_TEXT}")


def steps_equal_forward(subject: Subject, text: Text) -> float:
    """Return the error of law 2: outputs and final state token by token, compared with one forward pass."""
    return _parts_error(subject, subject.step, text, range(1, _time(text)))


def cuts_change_nothing(subject: Subject, text: Text, cuts: Sequence[int]) -> float:
    """Return the error of law 3: outputs and final state of consecutive parts, compared with one forward pass."""
    return _parts_error(subject, subject.forward, text, sorted(cuts))


def _parts_error(
    subject: Subject, read: Callable[[Text, Any], tuple[Tensor, Any]], text: Text, cuts: Sequence[int]
) -> float:
    whole, end = subject.forward(text, subject.init_state(_batch(text)))
    outputs, state = [], subject.init_state(_batch(text))
    for begin, stop in pairwise([0, *cuts, _time(text)]):
        if begin < stop:
            y, state = read(cut(text, begin, stop), state)
            outputs.append(y)
    pairs = zip(state_tensors(subject.settle(state)), state_tensors(subject.settle(end)), strict=True)
    return max(
        error(torch.cat(outputs, dim=whole.ndim - 2), whole), *(error(mine, other) for mine, other in pairs), 0.0
    )


def future_leaves_past(subject: Subject, text: Text, other: Text, position: int) -> float:
    """Return the error of law 4: the largest change of an output before `position` when all later tokens change."""
    time = _time(text)
    pairs = zip(cut(text, 0, position), cut(other, position, time), strict=True)
    mixed = tuple(None if x is None or y is None else torch.cat([x, y], _axis(x)) for x, y in pairs)
    y, y_mixed = (subject.forward(x, subject.init_state(_batch(text)))[0] for x in (text, mixed))
    past, past_mixed = (x.narrow(x.ndim - 2, 0, position) for x in (y, y_mixed))
    return float((past - past_mixed).detach().abs().max()) if position else 0.0


def state_is_not_modified(subject: Subject, text: Text) -> float:
    """Return the error of law 5: the largest change to a state that was passed in."""
    half = _time(text) // 2
    _, state = subject.forward(cut(text, 0, half), subject.init_state(_batch(text)))
    before = [tensor.detach().clone() for tensor in state_tensors(state)]
    subject.forward(cut(text, half, _time(text)), state)
    subject.step(cut(text, half, half + 1), state)
    pairs = zip(state_tensors(state), before, strict=True)
    changes = [(a.detach().double() - b.double()).abs().max() for a, b in pairs if a.numel()]
    return float(max(changes, default=torch.zeros(())))


def rows_are_independent(subject: Subject, text: Text, other: Text) -> float:
    """Return the error of law 6: the largest change of the first row's outputs when all other rows change."""
    mixed = tuple(
        None if x is None or y is None else torch.cat([x[:1], y[1:]]) for x, y in zip(text, other, strict=True)
    )
    y, y_mixed = (subject.forward(x, subject.init_state(_batch(text)))[0] for x in (text, mixed))
    return float((y[0] - y_mixed[0]).detach().abs().max())


def documents_are_independent(subject: Subject, packed: Text, unpacked: Text, begins: Sequence[int]) -> float:
    """Return the error of law 7: documents packed in one row, with document starts, compared with separate passes."""
    y, _ = subject.forward(packed, subject.init_state(_batch(packed)))
    alone = [
        subject.forward(cut(unpacked, begin, stop), subject.init_state(_batch(packed)))[0]
        for begin, stop in pairwise([*begins, _time(packed)])
    ]
    return error(y, torch.cat(alone, dim=y.ndim - 2))


def parts_equal_forward(attention: CausalAttention, before: Text, text: Text, cuts: Sequence[int]) -> float:
    """Return the error of law 12: outputs, final states and, if they are recorded, gradients of a text that continues
    `before`, compared with one forward pass. The effects of all parts are computed independently. A part is read from
    the state that the effects of the parts before it give."""
    assert text[2] is not None
    subject, trains = of_attention(attention, text[2]), torch.is_grad_enabled()
    with torch.no_grad():
        _, state = subject.forward(before, subject.init_state(_batch(text)))

    def leaf(x: Tensor) -> Tensor:
        return x.detach().requires_grad_(trains and x.is_floating_point())

    text, state = tuple(None if x is None else leaf(x) for x in text), map_state(leaf, state)
    parts = [cut(text, begin, stop) for begin, stop in pairwise([0, *sorted(cuts), _time(text)])]
    effects = [attention.effect(*arguments(attention, part)[1:]) for part in parts]
    longest = max(map(_time, parts))
    padded = [attention.padded_effect(effect, longest) for effect in effects]
    states = list(accumulate(padded, attention.after_effect, initial=state))
    outputs, ends = zip(*map(subject.forward, parts, states[:-1]), strict=True)
    whole, end = subject.forward(text, state)

    def compared(y: Tensor, *ends: Any) -> list[Tensor]:
        return [y, *(tensor for end in ends for tensor in state_tensors(subject.settle(end)))]

    measured, expected = compared(torch.cat(outputs, dim=2), ends[-1], states[-1]), compared(whole, end, end)
    if trains:
        leaves = [
            x for x in (*text, *state_tensors(state), *attention.parameters()) if x is not None and x.requires_grad
        ]
        slopes = [x.detach() for x in expected if x.requires_grad]
        for tensors in (measured, expected):
            recorded = [x for x in tensors if x.requires_grad]
            tensors += torch.autograd.grad(recorded, leaves, slopes, materialize_grads=True)
    return max(map(error, measured, expected))


def dead_or_infinite(y: Tensor, definition: Tensor) -> int:
    """Return, for law 9, the number of outputs (..., dim) that are 0 although the definition is not, plus the number of
    values that are not finite."""
    dead = (y.detach().float().norm(dim=-1) == 0) & (definition.detach().float().norm(dim=-1) > 0)
    return int(dead.sum()) + int((~y.isfinite()).sum())


def numbers_in_state(subject: Subject, text: Text) -> int:
    """Return, for law 8, how many numbers the state of a row holds after the text."""
    batch = _batch(text)
    _, state = subject.forward(text, subject.init_state(batch))
    return sum(tensor.numel() for tensor in state_tensors(state)) // batch


def error(measured: Tensor, truth: Tensor) -> float:
    """Return the norm of the difference over the norm of the truth, in float64; infinite if anything is not finite."""
    measured, truth = measured.detach().double(), truth.detach().double()
    difference, size = (measured - truth).norm(), truth.norm()
    if not torch.isfinite(difference):
        return float("inf")
    return float(difference / size) if size else float(difference)


def cut(text: Text, begin: int, stop: int) -> Text:
    """Return the text of the tokens from `begin` up to `stop`."""
    return tuple(None if x is None else x.narrow(_axis(x), begin, stop - begin) for x in text)


def _without(starts: int, text: Text) -> Text:
    """Return the text without its document starts."""
    return (*text[:starts], None, *text[starts + 1 :])


def _axis(x: Tensor) -> int:
    return 1 if x.ndim == 2 else 2


def _time(text: Text) -> int:
    assert text[0] is not None
    return text[0].shape[_axis(text[0])]


def _batch(text: Text) -> int:
    assert text[0] is not None
    return len(text[0])
