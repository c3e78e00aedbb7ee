"""Two runs on the same text differ by what they differ in each document, with the error of that."""

import math
from dataclasses import replace

import pytest
from evaluation.reports import LINEAR

from lmlong.evaluation.document_sums import Sums
from lmlong.evaluation.perplexity_report import difference_lines, differences
from lmlong.evaluation.results import AtLength, PerplexityReport

NATS = [300.0, 100.0, 800.0]
BYTES = [200, 100, 400]


def report(name: str, nats: list[float], sizes: list[int] = BYTES, text: str = "same") -> PerplexityReport:
    sums = Sums(len(nats))
    for document, (lost, size) in enumerate(zip(nats, sizes, strict=True)):
        sums.add(document, lost * math.log(2), size // 2, size)
    return replace(LINEAR, name=name, text=text, context=[AtLength(256, sums, 1.0)], carried=sums)


def test_a_difference_has_the_error_of_the_differences() -> None:
    less = [nats - 0.1 * size for nats, size in zip(NATS, BYTES, strict=True)]
    (found,) = differences([report("a", NATS), report("b", less)])
    assert [row.length for row in found.rows] == [256, None]
    for row in found.rows:
        assert row.bits.value == pytest.approx(-0.1)
        assert row.bits.error == pytest.approx(0, abs=1e-9)  # while each run has an error of its own
        assert row.sums.bits_error > 0.1
    assert "below 0 the first is better" in difference_lines(found)[1]
    assert difference_lines(found)[3].split() == ["256", "-0.1000", "0.0000", "1.6143", "1.7143"]


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (report("b", NATS, text="another"), "b minus a: measured on another text. Name one by --data."),
        (report("b", NATS, [200, 100, 402]), "b minus a: no targets in common. Give --lengths."),
    ],
)
def test_runs_on_other_targets_are_not_subtracted(other: PerplexityReport, why: str) -> None:
    (found,) = differences([report("a", NATS), other])
    assert difference_lines(found) == [why]
