"""Panels as pictures of a page: their text, their table, their colors, and values that cannot be drawn."""

import math
import re
from html import unescape

import pytest
from report.test_html import ATTACK, Outline

from lmlong.report.chart import chart, charts, description
from lmlong.report.figure import Level, Line, Mark, Panel, Style, style

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


def test_alternative_text_has_the_numbers() -> None:
    text = description(PANEL)
    assert text.startswith("Line chart: Loss, bits by tokens. a: 3 at 1k to 1 at 4k; lowest 1 at 4k, highest 3 at 1k.")
    assert text.endswith("2.5 at 4k. chance: 1.5. trained at 2k: 2k.")


def test_chart_is_an_image_with_a_caption_and_a_table() -> None:
    made = charts([PANEL])
    outline = Outline(made)
    (drawn,) = [attributes for tag, attributes in outline.elements if tag == "svg"]
    assert (drawn["role"], drawn["aria-label"]) == ("img", description(PANEL))
    assert "tokensafromto" in outline.text
    assert "1k304" in outline.text, "the row of 1k: the value, and its band cut at 0"
    for text in (ATTACK, "trained at 2k", "chance", "4k", "bits"):
        assert f">{text}<" in unescape(made)


def test_colors_are_those_of_the_page_and_charts_share_no_id() -> None:
    drawn = chart(PANEL)
    assert re.findall(r"(?:fill|stroke): *#[0-9a-f]+", drawn) == []
    assert {"--c0", "--c1", "--text", "--faint", "--line", "--shade"} <= set(re.findall(r"var\((--\w+)\)", drawn))
    ids = [re.findall(r' id="([^"]*)"', each) for each in (drawn, chart(PANEL._replace(title="Norm")))]
    assert ids[0] and not set(ids[0]) & set(ids[1])


@pytest.mark.parametrize("scale", ["linear", "log"])
@pytest.mark.parametrize("values", [[math.inf, 0.0, 10.0, 1e300], [1e308, -1e308, 1.0, 2.0], [0.0] * 4, [math.nan] * 4])
@pytest.mark.filterwarnings("error")
def test_values_without_a_place_are_left_out(values: list[float], scale: str) -> None:
    line = Line("a", [1, 2, 3, 4], values, style(0))
    drawn = chart(Panel([line], y_scale=scale)).split("<details>")[0]  # type: ignore[arg-type]
    shown = [value for value in values if abs(value) < 1e100 and (value > 0 or scale == "linear")]
    assert len(re.findall(r"<use [^>]*fill: var\(--c0\)", drawn)) == len(shown) + 1, "the points, and the legend's"
    assert not re.search(r"(?i)\b(nan|inf)\b", re.sub(r'aria-label="[^"]*"', "", drawn))
    chart(Panel([line._replace(low=values, high=values)], y_scale=scale))  # type: ignore[arg-type]


@pytest.mark.parametrize("lines", [[], [Line("a", [], [], style(0))], [LINE._replace(x=[1, 1, 1])]])
def test_panel_without_extent_is_drawn(lines: list[Line]) -> None:
    assert "svg" in {tag for tag, _ in Outline(chart(Panel(lines))).elements}
