"""The laws of causal attention, as functions that return errors: 0 where a law is exact, else relative to the norm.

They hold for anything with the verbs of the contract: an attention, or the language model around it.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmlong.attention.contract import CausalAttention, tensors

Inputs = tuple[Tensor | None, ...]
"""Tensors over the same tokens: (batch, time), (batch, heads, time) or (batch, heads, time, width)."""


class Subject(NamedTuple):
    """What the laws are asked of."""

    init_state: Callable[[int], Any]  # batch -> state
    prefill: Callable[[Inputs, Any], tuple[Tensor, Any]]
    step: Callable[[Inputs, Any], tuple[Tensor, Any]]


def of_attention(attention: CausalAttention, like: Tensor) -> Subject:
    """An attention whose inputs are (q, k, v, starts, log_decay), in the type and on the device of `like`."""

    def prefill(inputs: Inputs, state: Any) -> tuple[Tensor, Any]:
        q, k, v, starts, log_decay = inputs
        assert q is not None and k is not None and v is not None
        return attention.prefill(q, k, v, state, starts, log_decay)

    def step(inputs: Inputs, state: Any) -> tuple[Tensor, Any]:
        q, k, v, starts, log_decay = inputs
        assert q is not None and k is not None and v is not None
        return attention.step(q, k, v, state, starts, log_decay)

    return Subject(lambda batch: attention.init_state(batch, like.device, like.dtype), prefill, step)


def step_is_prefill(subject: Subject, inputs: Inputs) -> float:
    """Law 1: token by token, the outputs and the last state are those of reading all at once."""
    whole, end = subject.prefill(inputs, subject.init_state(_batch(inputs)))
    outputs, state = [], subject.init_state(_batch(inputs))
    for token in range(_time(inputs)):
        y, state = subject.step(cut(inputs, token, token + 1), state)
        outputs.append(y)
    return max(error(torch.cat(outputs, dim=whole.ndim - 2), whole), _states_differ(state, end))


def cuts_change_nothing(subject: Subject, inputs: Inputs, cuts: Sequence[int]) -> float:
    """Law 2: reading in parts, the state carried from one to the next, is reading the whole."""
    whole, end = subject.prefill(inputs, subject.init_state(_batch(inputs)))
    outputs, state = [], subject.init_state(_batch(inputs))
    borders = [0, *sorted(cuts), _time(inputs)]
    for begin, stop in pairwise(borders):
        if begin < stop:
            y, state = subject.prefill(cut(inputs, begin, stop), state)
            outputs.append(y)
    return max(error(torch.cat(outputs, dim=whole.ndim - 2), whole), _states_differ(state, end))


def future_leaves_past(subject: Subject, inputs: Inputs, other: Inputs, place: int) -> float:
    """Law 3: the largest change of an output before `place` when everything from there on is another text."""
    mixed = tuple(
        None
        if x is None or y is None
        else torch.cat([_narrow(x, 0, place), _narrow(y, place, _time(inputs))], _axis(x))
        for x, y in zip(inputs, other, strict=True)
    )
    here, _ = subject.prefill(inputs, subject.init_state(_batch(inputs)))
    there, _ = subject.prefill(mixed, subject.init_state(_batch(inputs)))
    past = here.narrow(here.ndim - 2, 0, place), there.narrow(there.ndim - 2, 0, place)
    return float((past[0] - past[1]).abs().max()) if place else 0.0


def state_is_not_touched(subject: Subject, inputs: Inputs) -> float:
    """Law 4: the largest change that reading on makes to the state it was given."""
    half = _time(inputs) // 2
    _, state = subject.prefill(cut(inputs, 0, half), subject.init_state(_batch(inputs)))
    kept = [tensor.clone() for tensor in tensors(state)]
    subject.prefill(cut(inputs, half, _time(inputs)), state)
    subject.step(cut(inputs, half, half + 1), state)
    changes = [(a.double() - b.double()).abs().max() for a, b in zip(tensors(state), kept, strict=True) if a.numel()]
    return float(max(changes, default=torch.zeros(())))


def rows_are_alone(subject: Subject, inputs: Inputs, other: Inputs) -> float:
    """Law 6: the largest change of the first row's outputs when all other rows are another text."""
    mixed = tuple(
        None if x is None or y is None else torch.cat([x[:1], y[1:]]) for x, y in zip(inputs, other, strict=True)
    )
    here, _ = subject.prefill(inputs, subject.init_state(_batch(inputs)))
    there, _ = subject.prefill(mixed, subject.init_state(_batch(inputs)))
    return float((here[0] - there[0]).abs().max())


def packed_is_alone(subject: Subject, inputs: Inputs, documents: Inputs, starts: Sequence[int]) -> float:
    """Law 6: documents packed in one row (`inputs`, with starts) give what they give alone (`documents`, without)."""
    packed, _ = subject.prefill(inputs, subject.init_state(_batch(inputs)))
    alone = []
    borders = [*starts, _time(inputs)]
    for begin, stop in pairwise(borders):
        y, _ = subject.prefill(cut(documents, begin, stop), subject.init_state(_batch(inputs)))
        alone.append(y)
    return error(packed, torch.cat(alone, dim=packed.ndim - 2))


def numbers_in_state(subject: Subject, inputs: Inputs) -> int:
    """Law 7: how many numbers a row's state holds after reading the inputs."""
    batch = _batch(inputs)
    _, state = subject.prefill(inputs, subject.init_state(batch))
    return sum(tensor.numel() for tensor in tensors(state)) // batch


def error(measured: Tensor, truth: Tensor) -> float:
    """The norm of the difference over the norm of the truth, in float64; infinite where anything is not finite."""
    measured, truth = measured.detach().double(), truth.detach().double()
    difference, size = (measured - truth).norm(), truth.norm()
    if not torch.isfinite(difference):
        return float("inf")
    return float(difference / size) if size else float(difference)


def cut(inputs: Inputs, begin: int, stop: int) -> Inputs:
    """The inputs of the tokens from `begin` up to `stop`."""
    return tuple(None if x is None else _narrow(x, begin, stop) for x in inputs)


def _states_differ(state: Any, truth: Any) -> float:
    pairs = zip(tensors(state), tensors(truth), strict=True)
    return max((error(mine, other) for mine, other in pairs), default=0.0)


def _axis(x: Tensor) -> int:
    return 1 if x.ndim == 2 else 2


def _narrow(x: Tensor, begin: int, stop: int) -> Tensor:
    return x.narrow(_axis(x), begin, stop - begin)


def _time(inputs: Inputs) -> int:
    assert inputs[0] is not None
    return inputs[0].shape[_axis(inputs[0])]


def _batch(inputs: Inputs) -> int:
    assert inputs[0] is not None
    return len(inputs[0])
