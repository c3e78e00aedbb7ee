"""Panels as SVG: where points stand, what is left out, and what a reader who cannot see them is told."""

import math
import re

import pytest
from report.test_html import ATTACK, Outline

from lmlong.report.figure import COLORS, DARK_COLORS, Level, Line, Mark, Panel, Style, style
from lmlong.report.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Scale, chart, charts, description, ticks

LINE = Line("a", [1, 2, 4], [3.0, math.nan, 1.0], style(0), low=[-1.0, math.nan, 0.5], high=[4.0, math.nan, 2.0])
PANEL = Panel(
    [LINE, Line(ATTACK, [1, 4], [2.0, 2.5], style(1), errors=[0.5, 0.5])],
    title="Loss",
    x_label="tokens",
    y_label="bits",
    ticks=[1, 2, 4],
    tick_name="{}k".format,
    levels=[Level(1.5, Style("0.5", ":"), text="chance")],
    marks=[Mark(2, "trained at 2k")],
    shade_from=2,
    y_limits=(0.0, math.inf),
)


def test_its_alternative_text_has_the_numbers() -> None:
    text = description(PANEL)
    assert text.startswith("Line chart: Loss, bits by tokens. a: 3 at 1k to 1 at 4k; lowest 1 at 4k, highest 3 at 1k.")
    assert text.endswith("2.5 at 4k. chance: 1.5. trained at 2k: 2k.")


def test_a_chart_is_an_image_with_a_legend_and_a_table() -> None:
    outline = Outline(charts([PANEL]))
    drawn = [attributes for tag, attributes in outline.elements if tag == "svg" and attributes.get("role") == "img"]
    assert [attributes["aria-label"] for attributes in drawn] == [description(PANEL)]
    assert [tag for tag, _ in outline.elements].count("li") == 2
    assert "aria-hidden" in next(a for tag, a in outline.elements if tag == "svg")
    assert "tokensafromto" in outline.text
    assert "1k304" in outline.text, "the row of 1k: the value, and its band cut at 0"


def test_points_stand_where_the_scale_puts_them() -> None:
    scale = Scale(1.0, 100.0, 0.0, 200.0, log=True)
    assert [scale(x) for x in (1, 10, 100)] == [0, 100, 200]
    assert Scale(0.0, 10.0, 100.0, 0.0, log=False)(2.5) == 75
    line = Line("a", [0, 10], [0.0, 10.0], style(0)._replace(marker=None))
    drawn = chart(Panel([line], y_range=(0, 10))).split("role=")[1]
    (path,) = re.findall(r'd="([^"]*)" class="line"', drawn)
    assert [float(number) for number in re.findall(r"[\d.]+", path)] == [LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, TOP]


def test_the_right_end_names_the_same_ticks() -> None:
    line = Line("a", [0, 10], [0.0, 10.0], style(0)._replace(marker=None))
    panel = Panel([line], y_label="bits", y_range=(0, 10), right_label="double", right_name=lambda y: f"is {2 * y:g}")
    drawn = chart(panel).split("role=")[1]
    left = dict(re.findall(r'y="([\d.]+)" text-anchor="end">(\d+)<', drawn))
    right = dict(re.findall(r'y="([\d.]+)" text-anchor="start">is (\d+)<', drawn))
    assert len(left) == 6 and right == {y: str(2 * int(name)) for y, name in left.items()}
    (path,) = re.findall(r'd="([^"]*)" class="line"', drawn)
    assert max(float(number) for number in re.findall(r"[\d.]+", path)[::2]) == WIDTH - LEFT
    assert ">double<" in drawn


def test_the_texts_of_marks_stand_above_the_lines() -> None:
    line = Line("a", [1, 4], [0.0, 10.0], style(0)._replace(marker=None))
    marks = [Mark(1, "trained at 512"), Mark(2, "trained at 2k"), Mark(4, "trained at 4k")]
    drawn = chart(Panel([line], y_range=(0, 10), ticks=[1, 2, 4], marks=marks)).split("role=")[1]
    (path,) = re.findall(r'd="([^"]*)" class="line"', drawn)
    top = min(float(number) for number in re.findall(r"[\d.]+", path)[1::2])
    texts = [float(y) for y in re.findall(r'y="([\d.]+)"[^>]*>trained', drawn)]
    assert len(texts) == 3 and max(texts) < top


def test_what_is_not_finite_or_huge_or_not_positive_on_a_log_scale_is_left_out() -> None:
    line = Line("a", [1, 2, 3, 4, 5], [math.inf, 0.0, 10.0, 1000.0, 1e300], style(0))
    made = chart(Panel([line], y_scale="log"))
    assert made.count("translate(") == 1 + 2, "the key of the legend, and two points"
    assert "nan" not in made.split("<details>")[0] and "Infinity" not in made


@pytest.mark.parametrize(
    "panel", [Panel([]), Panel([Line("a", [], [], style(0))]), Panel([LINE._replace(x=[1, 1, 1])])]
)
def test_nothing_or_one_place_is_drawn_too(panel: Panel) -> None:
    Outline(chart(panel))


@pytest.mark.parametrize(
    ("low", "high", "log", "expected"),
    [
        (0.0, 1.0, False, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (995.0, 1105.0, False, [1000, 1020, 1040, 1060, 1080, 1100]),
        (-3.0, 3.0, False, [-3, -2, -1, 0, 1, 2, 3]),
        (0.5, 2000.0, True, [1, 10, 100, 1000]),
        (3.0, 60.0, True, [5, 10, 20, 50]),
        (4.0, 8.0, True, [4, 5, 6, 7, 8]),
    ],
)
def test_ticks_are_round(low: float, high: float, log: bool, expected: list[float]) -> None:
    assert ticks(Scale(low, high, 0.0, 1.0, log)) == pytest.approx(expected)


def test_every_color_has_one_on_a_dark_background() -> None:
    assert len(DARK_COLORS) == len(set(DARK_COLORS)) == len(set(COLORS)) == len(COLORS)
