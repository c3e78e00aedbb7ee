"""Described figures, drawn."""

from pathlib import Path

import pytest
from matplotlib.axes import Axes

from lmlong.report.figure import COLORS, DARK_COLORS, Figure, Level, Line, Mark, Panel, Style, lines_of, style
from lmlong.report.plot import check_format, draw, save

LINES = [
    Line("a", [1, 1024], [2.0, 1.0], style(0), low=[1.5, 0.5], high=[2.5, 1.5]),
    Line("b", [1, 1024], [3.0, 2.0], style(1), errors=[0.1, 0.2]),
]
PANEL = Panel(
    LINES,
    title="loss",
    x_label="tokens",
    y_label="nats",
    ticks=[1, 1024],
    tick_name=lambda tick: f"n{tick}",
    levels=[Level(1.2, Style("0.6", ":"), label="chance"), Level(1.4, Style("0.6"), text="carried")],
    marks=[Mark(32, "trained")],
    shade_from=32,
    y_range=(0, 4),
)
FIGURE = Figure([[PANEL]], size=(6.4, 3.2), legend_columns=3)


def axes_of(panel: Panel, size: tuple[float, float] = (6.4, 4.4)) -> Axes:
    """The axes of a panel, with all texts in their places."""
    drawn = draw(Figure([[panel]], size))
    drawn.draw_without_rendering()
    return drawn.axes[0]


def test_panel_shows_lines_levels_and_marks() -> None:
    drawn = draw(FIGURE)
    axes = drawn.axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines["a"].get_ydata()) == [2.0, 1.0]
    band = axes.collections[0].get_paths()[0].vertices
    assert sorted({float(y) for x, y in band if x == 1}) == [1.5, 2.5]
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ("loss", "tokens", "nats")
    assert axes.get_ylim() == (0, 4)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["n1", "n1024"]
    assert [text.get_text() for text in axes.texts] == ["carried"]
    assert [label.get_text() for label in axes.child_axes[0].get_xticklabels()] == ["trained"]
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == ["a", "chance", "b"]


def test_texts_of_near_marks_do_not_overlap() -> None:
    marks = [Mark(x, f"trained at {x}") for x in (400, 512, 640)]
    axes = axes_of(Panel([], ticks=[256, 16_384], marks=marks))
    labels = axes.child_axes[0].get_xticklabels()
    shown = [(label.get_window_extent(), label.get_text().count("\n")) for label in labels]
    line = shown[0][0].height
    lowest = [box.y0 + rows * line for box, rows in shown]  # an empty row is below each text but the first
    assert lowest[0] + 0.8 * line < lowest[1] and lowest[1] + 0.8 * line < lowest[2]
    assert axes.title.get_window_extent().y0 >= max(box.y1 for box, _ in shown) - 1


def test_marks_of_a_log_axis_are_at_their_values() -> None:
    axes = axes_of(Panel([], ticks=[256, 16_384], marks=[Mark(512, "a"), Mark(2048, "b")]))
    centers = [sum(label.get_window_extent().intervalx) / 2 for label in axes.child_axes[0].get_xticklabels()]
    assert centers == pytest.approx([axes.transData.transform((x, 1))[0] for x in (512, 2048)], abs=1)


def test_ticks_are_named_in_full_and_of_many_every_second() -> None:
    axes = axes_of(Panel([], ticks=[2**n for n in range(10)]), (4, 4))
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "4", "16", "64", "256"]
    line = Line("a", [1, 2], [900.0, 6000.0], style(0))
    axes = axes_of(Panel([line], ticks=[1, 2], y_scale="log 1-2-5"), (4, 4))
    names = [label.get_text() for label in axes.yaxis.get_ticklabels(which="both")]
    assert {"1,000", "2,000", "5,000"} <= set(names) and "3,000" not in names


def test_the_right_end_names_the_same_ticks() -> None:
    line = Line("a", [1, 2], [2.0, 8.0], style(0))
    axes = axes_of(Panel([line], y_label="bits", right_label="double", right_name=lambda y: f"{2 * y:g}"), (4, 4))
    (right,) = axes.child_axes
    assert right.get_ylabel() == "double" and right.get_yticks().tolist() == axes.get_yticks().tolist()
    names = [label.get_text() for label in right.get_yticklabels()]
    assert names == [f"{2 * y:g}" for y in axes.get_yticks()]


def test_bands_and_error_bars_are_clipped() -> None:
    banded = Line("a", [1, 2], [0.1, 0.9], style(0), low=[-0.2, 0.8], high=[0.4, 1.2])
    barred = Line("b", [1, 2], [0.1, 0.9], style(1), errors=[0.3, 0.3])
    axes = axes_of(Panel([banded, barred], y_limits=(0.0, 1.0)), (4, 4))
    band, bars = axes.collections
    assert {float(y) for _, y in band.get_paths()[0].vertices} == {0.0, 0.4, 0.8, 1.0}
    ends = [y for segment in bars.get_segments() for y in segment[:, 1].tolist()]
    assert ends == [0.0, pytest.approx(0.4), pytest.approx(0.6), 1.0]


def test_legends_titles_and_notes_surround_the_data() -> None:
    lines = [Line(name, [1, 1024], [1.0, 2.0], style(number)) for number, name in enumerate("abcd")]
    panel = Panel(lines, "loss", "tokens", ticks=[1, 1024], note="1  one\n2  two", marks=[Mark(32, "here")])
    drawn = draw(Figure([[panel]], (5, 5), legend_columns=3))
    drawn.draw_without_rendering()
    (axes,) = drawn.axes
    data, legend = axes.get_window_extent(), drawn.legends[0].get_window_extent()
    note = next(text for text in axes.texts if "one" in text.get_text()).get_window_extent()
    title = axes.title.get_window_extent()
    assert title.y0 >= data.y1 and legend.y0 >= title.y1
    assert note.x0 == pytest.approx(data.x0, abs=3) and note.y1 < axes.xaxis.label.get_window_extent().y0
    assert note.y0 >= 0 and legend.y1 <= drawn.bbox.y1


def test_lines_can_be_told_apart_in_grey_and_on_a_dark_background() -> None:
    looks = [style(number) for number in range(2 * len(COLORS))]
    assert len({(look.marker, look.dashes) for look in looks}) == len(looks)
    assert len(DARK_COLORS) == len(set(DARK_COLORS)) == len(set(COLORS)) == len(COLORS)


@pytest.mark.parametrize(("name", "head"), [("a.png", b"\x89PNG"), ("a.PDF", b"%PDF"), ("a.svg", b"<?xml")])
def test_the_name_says_the_format(tmp_path: Path, name: str, head: bytes) -> None:
    check_format(tmp_path / name)
    save(FIGURE, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(head)


def test_shared_axis_is_labelled_once() -> None:
    panel = Panel([Line("a", [1, 2], [1, 2], style(0))], x_label="x", y_label="y")
    axes = draw(Figure([[panel, panel], [panel, panel]], (6, 4), share_x=True, share_y=True)).axes
    assert [(each.get_xlabel(), each.get_ylabel()) for each in axes] == [("", "y"), ("", ""), ("x", "y"), ("x", "")]


def test_lines_of_groups_have_their_styles() -> None:
    groups = [("a", [(1, 4.0, 0.5), (2, 3.0, 0.25)]), ("b", []), ("c", [(1, 2.0, 0.5)])]
    x, y, error = (lambda row, index=index: row[index] for index in range(3))
    first, empty, last = lines_of(groups, x, y, error=error, band=lambda row: (0, 9))
    assert (first.label, first.x, first.y, first.errors) == ("a", [1, 2], [4.0, 3.0], [1.0, 0.5])
    assert (first.low, first.high, empty.low, list(empty.x)) == ((0, 0), (9, 9), None, [])
    assert [line.style.color for line in (first, empty, last)] == list(COLORS[:3])


def test_titles_of_a_row_are_aligned() -> None:
    plain = PANEL._replace(marks=[])
    marked = PANEL._replace(marks=[Mark(32, "trained"), Mark(64, "again")])
    drawn = draw(Figure([[plain, marked]], size=(8, 4)))
    drawn.draw_without_rendering()
    heights = {round(axes.title.get_window_extent().y0) for axes in drawn.axes}
    assert len(heights) == 1


def test_small_changes_look_small() -> None:
    flat = [Line("a", [1, 1024], [2.0001, 2.0], style(0))]
    axes = axes_of(Panel(flat, least_span=0.02), (4, 4))
    low, high = axes.get_ylim()
    assert high - low == pytest.approx(0.02) and (low + high) / 2 == pytest.approx(2.00005)
    assert axes.yaxis.get_major_formatter().get_offset() == ""


def test_svg_is_the_same_each_time_and_keeps_text(tmp_path: Path) -> None:
    named = FIGURE._replace(rows=[[PANEL._replace(title="cost in $ of $5")]])
    for name in ("a.svg", "b.svg"):
        save(named, tmp_path / name)
    drawn = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert drawn == (tmp_path / "b.svg").read_text(encoding="utf-8")
    assert ">cost in $ of $5</text>" in drawn and "<dc:date>" not in drawn
