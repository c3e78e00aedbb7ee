"""The native reading that learns, beside its definition in float64."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from machine import needs_compiler, on_older_processors
from torch import Tensor
from torch.nn.functional import one_hot

from lmlong.model.learning.native import kernel
from lmlong.model.learning.state import BLOCK, NOT_LEARNED, Rates
from lmlong.model.loss import IGNORED
from lmlong.native import build

pytestmark = needs_compiler

RATES = Rates(rate=0.02, bias_rate=0.1, decay=0.03)


class Case(NamedTuple):
    weight: Tensor
    D: Tensor | None
    bias: Tensor
    hidden: Tensor
    targets: Tensor
    scored: Tensor


def draw(vocabulary: int, width: int, positions: int, scale: float = 1.0) -> Case:
    """Draw a text of which every fifth token is not learned, and every seventh not scored."""
    torch.manual_seed(vocabulary + width + positions)
    weight, D = 0.3 * torch.randn(vocabulary, width), 0.1 * torch.randn(vocabulary, width)
    targets, scored = torch.randint(vocabulary, (2, positions))
    targets[::5], scored[::7] = NOT_LEARNED, IGNORED
    hidden = scale * torch.randn(positions, width)
    return Case(weight, D, torch.randn(vocabulary), hidden, targets, scored)


Results = tuple[Tensor, Tensor | None, Tensor]
"""-log p, D and the bias."""


def definition(case: Case) -> Results:
    """Read as the formulas say."""
    weight, bias, hidden = case.weight.double(), case.bias.double(), case.hidden.double()
    D, rate = (0 * weight, 0) if case.D is None else (case.D.double(), RATES.rate)
    targets, scored = case.targets, case.scored
    nll = torch.zeros(len(hidden)).double()
    for begin in range(0, len(hidden), BLOCK):
        block = slice(begin, begin + BLOCK)
        log_p = (hidden[block] @ (weight + D).mT + bias).log_softmax(-1)
        nll[block] = -log_p.gather(1, scored[block, None].clamp_min(0))[:, 0] * (scored[block] != IGNORED)
        if begin + BLOCK < len(hidden):
            errors = log_p.exp() - one_hot(targets[block].clamp_min(0), len(weight))
            errors[targets[block] == NOT_LEARNED] = 0
            D = (1 - RATES.decay) * D - rate * errors.mT @ hidden[block]
            bias = (1 - RATES.decay) * bias - RATES.bias_rate * errors.sum(0)
    return nll, None if case.D is None else D, bias


def read(case: Case, threads: int = 1) -> Results:
    """Read by native code."""
    before = torch.get_num_threads()
    D, bias = None if case.D is None else case.D.clone(), case.bias.clone()
    torch.set_num_threads(threads)
    try:
        nll = kernel.read_blocks(case.weight, D, bias, case.hidden, case.targets, case.scored, RATES)
    finally:
        torch.set_num_threads(before)
    assert nll is not None
    return nll, D, bias


def assert_close(actual: Results, expected: Results, tolerance: float = 3e-6) -> None:
    for name, x, y in zip(("nll", "D", "bias"), actual, expected, strict=True):
        assert (x is None) == (y is None)
        if x is not None and y is not None:
            finite = y.isfinite()
            assert x.isfinite().equal(finite), f"{name}: other values are finite"
            error = (x.double() - y)[finite].abs().max() / y[finite].abs().max().clamp_min(1)
            assert error < tolerance, f"{name} differs by {error:.1e}"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("vocabulary", "width", "positions"),
    [(3, 1, 1), (5, 7, 16), (16, 32, 17), (17, 33, 15), (40, 64, 32), (100, 65, 33), (333, 100, 49), (5000, 320, 50)],
)
def test_equals_the_definition(vocabulary: int, width: int, positions: int, threads: int) -> None:
    case = draw(vocabulary, width, positions)
    results = read(case, threads)
    assert_close(results, definition(case))
    assert all(x.equal(y) for x, y in zip(results, read(case, threads), strict=True))  # type: ignore[union-attr,arg-type]


@pytest.mark.parametrize("positions", [16, 40])
def test_only_the_bias_is_learned(positions: int) -> None:
    case = draw(100, 30, positions)._replace(D=None)
    assert_close(read(case), definition(case))


@pytest.mark.parametrize("positions", [5, 32, 40])
def test_learning_without_scores_is_the_same(positions: int) -> None:
    case = draw(100, 30, positions)
    _, D, bias = read(case)
    nll, *unscored = read(case._replace(scored=torch.full_like(case.scored, IGNORED)))
    weight, own_D, own_bias, hidden, targets, _ = case
    assert kernel.read_blocks(weight, own_D, own_bias, hidden, targets, None, RATES) is None
    assert not nll.any() and D is not None and own_D is not None
    for learned_D, learned_bias in (unscored, (own_D, own_bias)):
        assert learned_D is not None and learned_D.equal(D) and learned_bias is not None and learned_bias.equal(bias)


def test_large_logits() -> None:
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


@pytest.mark.parametrize("name", ["targets", "scored"])
@pytest.mark.parametrize("token", [20, 1 << 40, -2])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_token_out_of_range(name: str, token: int, threads: int) -> None:
    case = draw(20, 8, 20)
    getattr(case, name)[18] = token
    with pytest.raises(IndexError, match="not in the vocabulary"):
        read(case, threads)


@on_older_processors
def test_processors_with_fewer_lanes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: list[str]) -> None:
    monkeypatch.setenv("LMLONG_CACHE", str(tmp_path))
    rest = [flag.replace("-O3", "-O1") for flag in build.FLAGS if flag != "-march=native"]
    monkeypatch.setattr(build, "FLAGS", (*rest, *flags))
    library = kernel.library.__wrapped__()
    monkeypatch.setattr(kernel, "library", lambda: library)
    case = draw(333, 100, 49)
    assert_close(read(case, 2), definition(case))
    assert len(list(tmp_path.glob("native/*/code.so"))) == 1
