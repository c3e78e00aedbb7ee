"""Native code reads tensors as memory: outputs and gradients must not depend on how a tensor is laid out there.

B batch, H heads, T time, K key dim, F features, V value dim.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from attention.cases import HEAD_DIM, HEADS, VALUE_DIM
from attention.scans import Identity, ScanInputs
from attention.scans import delta_scan as scan_delta
from attention.scans import linear_scan as scan_linear
from machine import needs_compiler
from torch import Tensor

from lmlong.attention.delta.features import Silu, UnitFeatures
from lmlong.attention.delta.native import NativeDelta
from lmlong.attention.feature_maps import Elu
from lmlong.attention.linear.native import NativeLinear
from lmlong.attention.ngram.hashing import ngram_hashes
from lmlong.attention.ngram.native.kernel import NativeNgram
from lmlong.attention.ngram.state import empty_state

pytestmark = needs_compiler

BATCH, TIME, ROWS = 2, 70, 16

Function = Callable[..., Sequence[Tensor]]


def linear_scan(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, S: Tensor, z: Tensor) -> Sequence[Tensor]:
    return scan_linear(NativeLinear(), Elu(HEAD_DIM), ScanInputs(q, k, v, None, log_decay), S, z)


def linear_scan_of_features(q: Tensor, k: Tensor, v: Tensor, S: Tensor, z: Tensor) -> Sequence[Tensor]:
    return scan_linear(NativeLinear(), Identity(), ScanInputs(q.abs(), k.abs(), v, None, None), S, z)


def delta_scan(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, starts: Tensor, S: Tensor
) -> Sequence[Tensor]:
    return scan_delta(NativeDelta(), UnitFeatures(Silu(HEAD_DIM)), ScanInputs(q, k, v, starts, log_decay, beta), S)


def ngram(v: Tensor, hashes: Tensor, S: Tensor, number: Tensor, ngrams: Tensor) -> Sequence[Tensor]:
    empty = empty_state(number.shape, S.shape[-1], S.device, S.dtype)
    sums, numbers, state = NativeNgram().read(v, hashes, None, empty._replace(S=S, number=number, ngram=ngrams))
    return sums, numbers, *state[:3]


def arguments(function: Function) -> dict[str, Tensor]:
    """Draw the arguments of a function; a state is one that has read something."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(BATCH, HEADS, *shape, generator=draw)

    starts = torch.zeros(BATCH, TIME, dtype=torch.bool)
    starts[0, 40] = True
    scans = {
        "q": normal(TIME, HEAD_DIM),
        "k": normal(TIME, HEAD_DIM),
        "v": normal(TIME, VALUE_DIM),
        "log_decay": normal(TIME, HEAD_DIM).abs().neg() if function is linear_by_channel else normal(TIME).abs().neg(),
        "beta": normal(TIME).sigmoid(),
        "starts": starts,
        "S": normal(HEAD_DIM, VALUE_DIM),
        "z": normal(HEAD_DIM).abs() + 1,
    }
    if function is not ngram:
        return {name: scans[name] for name in function.__annotations__ if name in scans}
    tokens = torch.randint(3, (BATCH, TIME, 4), generator=draw)
    hashes = ngram_hashes(tokens, [1, 2, 3][:HEADS] + [3] * (HEADS - 3))
    empty = empty_state((BATCH, HEADS, ROWS), VALUE_DIM, hashes.device, torch.float32)
    state = ngram(scans["v"], hashes, *empty[:3])[2:]
    return {"v": scans["v"], "hashes": hashes, **dict(zip(("S", "number", "ngrams"), state, strict=True))}


def linear_by_channel(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, S: Tensor, z: Tensor) -> Sequence[Tensor]:
    return scan_linear(NativeLinear(), Elu(HEAD_DIM), ScanInputs(q, k, v, None, log_decay), S, z)


FUNCTIONS: list[Function] = [linear_scan, linear_by_channel, linear_scan_of_features, delta_scan, ngram]


def layouts(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Iterate over tensors in other layouts, of the same numbers but for those that are expanded."""
    yield "transposed", x.mT.contiguous().mT
    yield "heads first", x.transpose(0, 1).contiguous().transpose(0, 1)
    yield "every second", torch.stack([x, x + 1 if x.dtype != torch.bool else x], dim=-1)[..., 0]
    for dim in range(x.ndim):
        yield f"expanded along {dim}", x.narrow(dim, 0, 1).expand_as(x)


def results(function: Function, given: dict[str, Tensor], slopes: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Return outputs and all gradients; `slopes` are the gradients of the outputs."""
    leaves = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in given.items()}
    outputs = function(**leaves)
    found = [y for y in outputs if y.requires_grad]
    slopes = [torch.ones_like(y).cumsum(-1) for y in found] if slopes is None else slopes
    wanted = [x for x in leaves.values() if x.requires_grad]
    grads = torch.autograd.grad(found, wanted, slopes, allow_unused=True)
    return [*(y.detach() for y in outputs), *(grad for grad in grads if grad is not None)]


def same(found: Sequence[Tensor], expected: Sequence[Any]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_arguments_in_any_layout(function: Function) -> None:
    given = arguments(function)
    wrong = [
        f"{name} {layout}"
        for name, x in given.items()
        for layout, other in layouts(x)
        if not same(results(function, {**given, name: other}), results(function, {**given, name: other.contiguous()}))
    ]
    assert not wrong


@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_of_outputs_in_any_layout(function: Function) -> None:
    given = arguments(function)
    outputs = [
        torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        for y in function(**{name: x.detach().requires_grad_(x.is_floating_point()) for name, x in given.items()})
        if y.requires_grad
    ]
    wrong = [
        f"output {number} {layout}"
        for number, slope in enumerate(outputs)
        for layout, other in layouts(slope)
        if not same(
            results(function, given, [*outputs[:number], other, *outputs[number + 1 :]]),
            results(function, given, [*outputs[:number], other.contiguous(), *outputs[number + 1 :]]),
        )
    ]
    assert not wrong
