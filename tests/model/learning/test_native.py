"""The native reading that learns, beside its definition in float64."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from grids import every_nth, thinned
from machine import needs_native, on_other_processors
from torch import Tensor

from lmlong.model.learning.naive import naive_read
from lmlong.model.learning.native import kernel
from lmlong.model.learning.state import BLOCK, NOT_LEARNED, Delta, Rates
from lmlong.model.loss import IGNORED
from lmlong.native import build
from lmlong.native.state import map_state, state_tensors

pytestmark = needs_native

RATES = Rates(rate=0.02, bias_rate=0.1, prior=2.0)


class Case(NamedTuple):
    weight: Tensor
    delta: Delta
    hidden: Tensor
    targets: Tensor
    scored: Tensor


def draw(vocabulary: int, width: int, positions: int, scale: float = 1.0, rank: int | None = None) -> Case:
    """Draw a text of which every fifth token is not learned, and every seventh not scored."""
    torch.manual_seed(vocabulary + width + positions)
    weight, D = 0.3 * torch.randn(vocabulary, width), 0.1 * torch.randn(vocabulary, rank or width)
    delta = Delta(D, torch.randn(vocabulary), torch.rand(vocabulary), torch.tensor([0.6, 0.7]), torch.tensor(5.0))
    targets, scored = torch.randint(vocabulary, (2, positions))
    targets[::5], scored[::7] = NOT_LEARNED, IGNORED
    return Case(weight, delta, scale * torch.randn(positions, width), targets, scored)


Results = tuple[Tensor, Delta]
"""-log p, and what is learned."""


def definition(case: Case) -> Results:
    """Read as the formulas say."""
    delta = map_state(Tensor.double, case.delta)
    weight, hidden, is_learned = case.weight.double(), case.hidden.double(), case.targets != NOT_LEARNED
    targets, scored = case.targets.clamp_min(0), case.scored.clamp_min(0)
    _, after = naive_read(weight, delta, hidden, targets, is_learned, RATES)
    nll = []
    for begin in range(0, len(hidden), BLOCK):  # tokens that are scored may be others than those that are learned
        block = slice(begin, begin + BLOCK)
        nll.append(naive_read(weight, delta, hidden[block], scored[block], is_learned[block], RATES)[0])
        _, delta = naive_read(
            weight, delta, *(x[begin : begin + BLOCK + 1] for x in (hidden, targets, is_learned)), RATES
        )
    return torch.cat(nll) * (case.scored != IGNORED), after


def read(case: Case, threads: int = 1) -> Results:
    """Read by native code."""
    before = torch.get_num_threads()
    delta = map_state(Tensor.clone, case.delta)
    torch.set_num_threads(threads)
    try:
        nll = kernel.read_blocks(case.weight, delta, case.hidden, case.targets, case.scored, RATES)
    finally:
        torch.set_num_threads(before)
    assert nll is not None
    return nll, delta


def assert_close(actual: Results, expected: Results, tolerance: float = 3e-6) -> None:
    names = ("nll", *Delta._fields)
    for name, x, y in zip(names, (actual[0], *actual[1]), (expected[0], *expected[1]), strict=True):
        assert (x is None) == (y is None)
        if x is not None and y is not None:
            finite = y.isfinite()
            assert x.isfinite().equal(finite), f"{name}: other values are finite"
            error = (x.double() - y)[finite].abs().max() / y[finite].abs().max().clamp_min(1)
            assert error < tolerance, f"{name} differs by {error:.1e}"


two_threads_too = pytest.mark.parametrize("threads", [1, 2])


@thinned(
    pytest.mark.parametrize(
        ("vocabulary", "width", "positions", "rank"),
        [
            (3, 1, 1, None),
            (5, 7, 16, None),
            (17, 33, 15, None),
            (40, 64, 32, None),
            (333, 100, 49, None),
            (999, 320, 50, None),
            (3, 2, 49, 1),
            (40, 33, 49, 16),
            (100, 320, 49, 70),
        ],
    ),
    two_threads_too,
)
def test_native_reading_follows_the_definition(
    vocabulary: int, width: int, positions: int, rank: int | None, threads: int
) -> None:
    case = draw(vocabulary, width, positions, rank=rank)
    results = read(case, threads)
    assert_close(results, definition(case))
    assert all(x.equal(y) for x, y in zip(state_tensors(results), state_tensors(read(case, threads)), strict=True))


@pytest.mark.parametrize("positions", [5, 32, 40])
def test_learning_without_scores_is_the_same(positions: int) -> None:
    case = draw(100, 30, positions)
    _, learned = read(case)
    nll, unscored = read(case._replace(scored=torch.full_like(case.scored, IGNORED)))
    weight, own, hidden, targets, _ = case
    assert kernel.read_blocks(weight, own, hidden, targets, None, RATES) is None
    assert not nll.any()
    for delta in (unscored, own):
        assert all(x.equal(y) for x, y in zip(state_tensors(delta), state_tensors(learned), strict=True))


def test_large_logits_follow_the_definition() -> None:
    case = draw(300, 64, 17, scale=100)
    assert_close(read(case), definition(case), 1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_spoils_only_later_blocks(value: float) -> None:
    case = draw(300, 64, 50)
    case.hidden[20] = value
    nll = read(case, 2)[0]
    spoiled = torch.arange(50) >= 32
    spoiled[20] = True
    assert nll.isnan().equal(spoiled & (case.scored != IGNORED))


@thinned(
    pytest.mark.parametrize("name", ["targets", "scored"]),
    pytest.mark.parametrize("token", [20, 1 << 40, -2]),
    two_threads_too,
)
def test_a_token_out_of_range_is_refused(name: str, token: int, threads: int) -> None:
    case = draw(20, 8, 20)
    getattr(case, name)[18] = token
    with pytest.raises(IndexError, match="not in the vocabulary"):
        read(case, threads)


@every_nth(5, on_other_processors)
def test_processors_with_other_instructions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: list[str]) -> None:
    monkeypatch.setenv("LMLONG_CACHE", str(tmp_path))
    rest = [flag.replace("-O3", "-O1") for flag in build.FLAGS if flag != "-march=native"]
    monkeypatch.setattr(build, "FLAGS", (*rest, *flags))
    library = kernel.library.__wrapped__()
    monkeypatch.setattr(kernel, "library", lambda: library)
    case = draw(333, 100, 49)
    assert_close(read(case, 2), definition(case))
    assert len(list(tmp_path.glob("native/*/code.so"))) == 1
