"""What a plot shows."""

import dataclasses
import math
from pathlib import Path

import pytest
from evaluation.reports import LINEAR, SOFTMAX, sums
from matplotlib.axes import Axes

from lmlong.charts import check_format
from lmlong.errors import UsageError
from lmlong.evaluation.plots import draw, figure
from lmlong.evaluation.report import AtLength, Report

SECOND = dataclasses.replace(SOFTMAX, context=[AtLength(256, sums(2.0, 2.1), 1.0), AtLength(1024, sums(1.7, 1.8), 1.0)])
REPORTS = [LINEAR, SECOND]


def bits(report: Report) -> list[float]:
    return [point.sums.totals.bits_per_byte for point in report.context]


def test_each_run_is_a_line_through_its_points_that_grey_tells_apart() -> None:
    axes = figure(REPORTS).axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    for report in REPORTS:
        line = lines[report.name]
        assert list(line.get_xdata()) == [point.length for point in report.context]
        assert list(line.get_ydata()) == bits(report)
    assert len({(lines[report.name].get_marker(), lines[report.name].get_linestyle()) for report in REPORTS}) == 2


def test_bands_are_two_standard_errors_wide_on_either_side() -> None:
    context, position, _ = figure(REPORTS).axes
    first, last = LINEAR.context[0].sums, LINEAR.context[-1].sums
    assert band(context, 256) == (first.totals.bits_per_byte,) * 2
    error = (0.2 - 0.1) / 2 / 4 / math.log(2)  # of the differences of two documents, in bits per byte
    assert band(context, 1024) == pytest.approx((last.totals.bits_per_byte - 2 * error, bits(LINEAR)[-1] + 2 * error))
    at = LINEAR.position[0].sums
    assert band(position, 1) == pytest.approx(
        (at.totals.bits_per_byte - 2 * at.bits_error, at.totals.bits_per_byte + 2 * at.bits_error)
    )


def band(axes: Axes, place: int) -> tuple[float, float]:
    """Where the first band of a panel begins and ends."""
    heights = [float(y) for x, y in axes.collections[0].get_paths()[0].vertices if x == place]
    return min(heights), max(heights)


def test_there_is_a_panel_for_each_view_that_was_taken() -> None:
    context, position, windows = figure(REPORTS).axes
    assert [axes.get_xlabel() for axes in (context, position, windows)] == [
        "tokens read before the same targets\n(band: the change from the shortest)",
        "tokens before, read from the beginning",
        "tokens in a window",
    ]
    assert context.get_ylabel() == "bits per byte, ± 2 standard errors"
    assert [label.get_text() for label in context.get_xticklabels()] == ["256", "1k"]
    assert [label.get_text() for label in position.get_xticklabels()] == ["1", "1k"]
    assert {line.get_label() for line in windows.lines} >= {"linear, reset", "linear, sliding"}
    assert windows.texts[0].get_text() == "carried"
    assert len(figure([SECOND]).axes) == 1


def test_the_trained_length_is_marked_where_it_lies_within_the_chart() -> None:
    axes = figure(REPORTS).axes[0]
    assert axes.get_xscale() == "log"
    assert sorted(text.get_text() for text in axes.texts) == ["trained at 1k", "trained at 512"]
    assert [text.get_text() for text in figure([SOFTMAX]).axes[0].texts] == []


@pytest.mark.parametrize(("name", "head"), [("a.png", b"\x89PNG"), ("a.PDF", b"%PDF"), ("a.svg", b"<?xml")])
def test_the_name_says_the_format(tmp_path: Path, name: str, head: bytes) -> None:
    check_format(tmp_path / name)
    draw(REPORTS, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(head)


def test_a_name_that_says_no_format_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"^length\.jpeg: cannot be drawn\. Give a name that ends in \.png, \.pdf, \.svg\.$"
    ):
        check_format(Path("length.jpeg"))
