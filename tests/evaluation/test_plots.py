"""What a plot shows."""

from pathlib import Path

import pytest

from lmlong.charts import check_format
from lmlong.errors import UsageError
from lmlong.evaluation.perplexity import AtLength, Curve
from lmlong.evaluation.plots import draw, figure
from lmlong.inference.state_size import Size, StateSize
from lmlong.model.scoring import Totals


def curve(name: str, trained: int, lengths: list[int]) -> Curve:
    points = [AtLength(length, Totals(nats=1000.0 / length, tokens=10, bytes=20), 1.0) for length in lengths]
    return Curve(name, "", 1, StateSize(Size(1, 4), Size(0, 0)), trained, points, [])


CURVES = [curve("linear", 1024, [256, 1024, 4096]), curve("softmax", 1024, [256, 512])]


def test_each_run_is_a_line_through_its_points_that_grey_tells_apart() -> None:
    (axes,) = figure(CURVES).axes
    lines = {line.get_label(): line for line in axes.lines}
    for shown in CURVES:
        line = lines[shown.name]
        assert list(line.get_xdata()) == [point.length for point in shown.points]
        assert list(line.get_ydata()) == [point.totals.bits_per_byte for point in shown.points]
    assert len({(lines[shown.name].get_marker(), lines[shown.name].get_linestyle()) for shown in CURVES}) == 2


def test_lengths_are_named_on_a_log_axis() -> None:
    (axes,) = figure(CURVES).axes
    assert axes.get_xscale() == "log"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["256", "512", "1k", "4k"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == (
        "tokens in a window, each window read from an empty state",
        "bits per byte",
    )


def test_the_trained_length_is_marked_once() -> None:
    (axes,) = figure(CURVES).axes
    assert [list(line.get_xdata()) for line in axes.lines if line.get_label() not in ("linear", "softmax")] == [
        [1024] * 2
    ]
    assert [text.get_text() for text in axes.texts] == ["trained at 1k"]


@pytest.mark.parametrize(("name", "head"), [("a.png", b"\x89PNG"), ("a.PDF", b"%PDF"), ("a.svg", b"<?xml")])
def test_the_name_says_the_format(tmp_path: Path, name: str, head: bytes) -> None:
    check_format(tmp_path / name)
    draw(CURVES, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(head)


def test_a_name_that_says_no_format_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"^length\.jpeg: cannot be drawn\. Give a name that ends in \.png, \.pdf, \.svg\.$"
    ):
        check_format(Path("length.jpeg"))
