"""Spectra as a table, as JSON and as a plot."""

from collections.abc import Sequence

import numpy as np
import pytest

from lmlong.evaluation.spectrum import Spectrum, count_needed
from lmlong.evaluation.spectrum_report import figure, table, to_json
from lmlong.report.plot import draw


def made_up(name: str, length: int, layers: Sequence[Sequence[int]]) -> Spectrum:
    """Of matrices whose singular values are alike as far as their ranks, by layer and head."""
    curves = [np.array([np.minimum(np.arange(1, length + 1) / rank, 1) for rank in heads]) for heads in layers]
    return Spectrum(name, ["softmax"] * len(layers), length, 2, curves, np.stack([*map(count_needed, curves)]))


FOUND = [made_up("one", 16, [[1, 16], [4, 8]]), made_up("two", 1024, [[10, 20]])]


def test_the_table_has_a_line_for_each_layer() -> None:
    lines = [line.split() for line in table(FOUND).splitlines()]
    assert "one: singular values of attention in 2 texts of n = 16 tokens" in table(FOUND)
    assert ["1", "softmax", "8.0", "50%", "1", "to", "15", "0.625", "0.250", "to", "1.000"] in lines
    assert ["2", "softmax", "6.0", "38%", "4", "to", "8", "0.750", "0.500", "to", "1.000"] in lines
    wide = table([made_up("run", 65_536, [[60_000, 59_000]])])
    assert max(map(len, wide.splitlines())) <= 80


def test_the_chart_has_a_curve_for_each_layer_and_a_field_for_each_head() -> None:
    axes = draw(figure(FOUND)).axes
    curves, heat = axes[0], axes[1]
    lines = {line.get_label(): line for line in curves.lines}
    assert list(lines["layer 2"].get_ydata()) == pytest.approx(list(FOUND[0].cumulative[1].mean(axis=0)))
    assert np.array_equal(heat.images[0].get_array(), FOUND[0].quarter)
    assert [text.get_text() for text in heat.texts] == ["1.00", "0.25", "1.00", "0.50"]


def test_the_report_says_what_is_of_blocks_and_counts_their_values() -> None:
    long, short = made_up("run", 16, [[1, 16], [4, 8]]), made_up("run", 8, [[2, 8], [2, 2]])
    mixed = long._replace(
        kinds=["softmax"] * 4,
        cumulative=[long.cumulative[0], *short.cumulative, long.cumulative[1]],
        needed=np.stack([long.needed[0], *short.needed, long.needed[1]]),
    )
    shown = table([mixed])
    assert "\nlayers 2 to 3 read blocks of them: n = 8 there\n" in shown and "blocks of" not in table([long])
    lines = [line.split() for line in shown.splitlines()]
    assert ["2", "softmax", "5.0", "62%", "2", "to", "8", "0.625", "0.250", "to", "1.000"] in lines
    (of_run,) = to_json([mixed])["runs"]
    layers = of_run["spectra"][0]["layers"]
    assert [layer["values"] for layer in layers] == [len(layer["cumulative"][0]) for layer in layers] == [16, 8, 8, 16]
    curves, heat = draw(figure([mixed])).axes[:2]
    assert [len(line.get_xdata()) for line in curves.lines[:4]] == [16, 8, 8, 16]
    assert heat.get_title() == "share of the largest 4 or 2"
    deep = draw(figure([mixed, made_up("deep", 16, [[1]] * 5)]))
    assert [text.get_text() for text in deep.legends[0].get_texts()][-2:] == ["layer 5", "all alike"]
