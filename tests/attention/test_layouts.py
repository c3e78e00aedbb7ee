"""Native code reads tensors as memory: outputs and gradients must not depend on how a tensor is stored."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from attention.cases import HEADS
from attention.scans import VALUES, WIDTH, Identity, ScanInputs, delta_scan, in_dtype, linear_scan, scan_inputs
from machine import needs_native
from torch import Tensor

from lmlong.attention.delta.naive import Silu, UnitFeatures
from lmlong.attention.delta.native import NativeDelta
from lmlong.attention.feature_maps import Elu
from lmlong.attention.linear.native import NativeLinear
from lmlong.attention.ngram.hashing import ngram_hashes
from lmlong.attention.ngram.native.kernel import NativeNgram
from lmlong.attention.ngram.state import empty_state

pytestmark = needs_native

ROWS = 16

Function = Callable[..., Sequence[Tensor]]
"""From tensors by name to outputs and the state after."""

SCANS: dict[str, tuple[Function, tuple[int, ...] | None]] = {
    "linear": (partial(linear_scan, NativeLinear(), Elu(WIDTH)), ()),
    "linear by channel": (partial(linear_scan, NativeLinear(), Elu(WIDTH)), (WIDTH,)),
    "linear of features": (partial(linear_scan, NativeLinear(), Identity()), None),
    "delta": (partial(delta_scan, NativeDelta(), UnitFeatures(Silu(WIDTH))), ()),
}


def ngram(v: Tensor, hashes: Tensor, S: Tensor, number: Tensor, ngrams: Tensor) -> Sequence[Tensor]:
    empty = empty_state(number.shape, S.shape[-1], S.device, S.dtype)
    sums, numbers, state = NativeNgram().read(v, hashes, None, empty._replace(S=S, number=number, ngram=ngrams))
    return sums, numbers, *state[:3]


def function_and_arguments(name: str) -> tuple[Function, dict[str, Tensor]]:
    """Return a function and random arguments; a state is one that has read something."""
    if name == "ngram":
        x = scan_inputs(70)
        hashes = ngram_hashes(torch.randint(3, (2, 70, 4), generator=torch.Generator().manual_seed(0)), [1, 2, 3])
        empty = empty_state((2, HEADS, ROWS), VALUES, hashes.device, torch.float32)
        state = ngram(x.v.float(), hashes, *empty[:3])[2:]
        return ngram, {"v": x.v.float(), "hashes": hashes, **dict(zip(("S", "number", "ngrams"), state, strict=True))}
    scan, decay = SCANS[name]
    x = in_dtype(scan_inputs(70, [40], decay), torch.float32)
    if decay is None:
        x = x._replace(q=x.q.abs(), k=x.k.abs())
    draw = torch.Generator().manual_seed(0)
    states = {"S": torch.rand(2, HEADS, WIDTH, VALUES, generator=draw)}
    if name != "delta":
        x, states["z"] = x._replace(beta=None), torch.rand(2, HEADS, WIDTH, generator=draw) + 1

    def function(**tensors: Tensor) -> Sequence[Tensor]:
        inputs = ScanInputs(**{field: tensors.get(field) for field in ScanInputs._fields})  # type: ignore[arg-type]
        return scan(inputs, *(tensors[state] for state in states))

    return function, {**{field: t for field, t in x._asdict().items() if t is not None}, **states}


def layouts(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Iterate over tensors in other layouts, with the same numbers except where they are expanded."""
    yield "transposed", x.mT.contiguous().mT
    yield "heads first", x.transpose(0, 1).contiguous().transpose(0, 1)
    yield "every second", torch.stack([x, x + 1 if x.dtype != torch.bool else x], dim=-1)[..., 0]
    for dim in range(x.ndim):
        yield f"expanded along {dim}", x.narrow(dim, 0, 1).expand_as(x)


def results(function: Function, given: dict[str, Tensor], slopes: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Return outputs and all gradients; `slopes` are the gradients of the outputs."""
    leaves = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in given.items()}
    outputs = function(**leaves)
    trained = [y for y in outputs if y.requires_grad]
    slopes = [torch.ones_like(y).cumsum(-1) for y in trained] if slopes is None else slopes
    inputs = [x for x in leaves.values() if x.requires_grad]
    grads = torch.autograd.grad(trained, inputs, slopes, allow_unused=True)
    return [*(y.detach() for y in outputs), *(grad for grad in grads if grad is not None)]


def same(found: Sequence[Tensor], expected: Sequence[Any]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", [*SCANS, "ngram"])
def test_arguments_and_gradients_of_outputs_in_any_layout(name: str) -> None:
    function, given = function_and_arguments(name)
    for argument, x in given.items():
        for layout, other in layouts(x):
            contiguous = results(function, {**given, argument: other.contiguous()})
            assert same(results(function, {**given, argument: other}), contiguous), f"{argument} {layout}"

    leaves = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in given.items()}
    slopes = [torch.randn_like(y) for y in function(**leaves) if y.requires_grad]
    for number, slope in enumerate(slopes):
        for layout, other in layouts(slope):
            found, contiguous = (
                results(function, given, [*slopes[:number], one, *slopes[number + 1 :]])
                for one in (other, other.contiguous())
            )
            assert same(found, contiguous), f"output {number} {layout}"
