"""The approximation study as a table, as plain values and as a chart."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lmlong.bench.approximation import Form, Measured, cases
from lmlong.charts import COLOURS, MARKERS, clear

DRAWN_DEVIATIONS = (0.25, 0.5, 1.0, 1.5)
HIGHEST = 3.0
"""Larger errors leave the chart: at 1 the approximation is worth no more than answering 0."""


def table(results: Sequence[Measured]) -> str:
    """For an 80-column terminal: where each form wins, what orthogonal rows save, what the norms do."""
    most = max(result.setting.features for result in results)
    lines = [
        f"relative error of causal attention with {most} features, median over the seeds",
        "",
        f"{'':14}{'orthogonal rows, chi norms':<34}{'':6}{'positive, orthogonal':<22}",
        f"{'width':>5}{'inputs':>8} {'positive':>9}{'hyperbolic':>11}{'trig':>8}  {'winner':<11}"
        f"{'gain':>6}{'fixed':>8}{'quantile':>10}",
    ]
    for case in cases(results):
        forms = case.forms
        lines.append(
            f"{case.width:>5}{case.deviation:>8.2f} {forms['positive']:>9.3f}{forms['hyperbolic']:>11.3f}"
            f"{_short(forms['trig']):>8}  {case.winner:<11}{case.gain:>6.3f}{case.norms['fixed']:>8.3f}"
            f"{case.norms['quantile']:>10.3f}"
        )
    lines += [
        "",
        "gain: error of independent rows over that of orthogonal ones, positive, chi;",
        "      the median over all numbers of features",
    ]
    return "\n".join(lines)


def plain(results: Sequence[Measured]) -> list[dict[str, Any]]:
    """Every setting with its median error and quartiles."""
    return [
        {**r.setting._asdict(), "median": r.median, "lower_quartile": r.lower, "upper_quartile": r.upper}
        for r in results
    ]


def draw(results: Sequence[Measured], path: Path) -> None:
    """Error against number of features into an image file: a row for each width, a column for some deviations."""
    widths = sorted({result.setting.width for result in results})
    deviations = sorted({result.setting.deviation for result in results})
    deviations = [value for value in deviations if value in DRAWN_DEVIATIONS] or deviations
    drawn = Figure(figsize=(2.3 * len(deviations) + 0.8, 2.6 * len(widths) + 0.6), layout="constrained")
    grid = drawn.subplots(len(widths), len(deviations), sharex=True, sharey=True, squeeze=False)
    for row, width in zip(grid, widths, strict=True):
        for axes, deviation in zip(row, deviations, strict=True):
            _panel(axes, [r for r in results if (r.setting.width, r.setting.deviation) == (width, deviation)])
            axes.set_title(f"width {width}, deviation {deviation:g}", fontsize="small")
    for axes in grid[-1]:
        axes.set_xlabel("features")
    grid[0][0].set_ylim(top=HIGHEST)
    for axes in grid[:, 0]:
        axes.set_ylabel("relative error")
    drawn.legend(*grid[0][0].get_legend_handles_labels(), loc="outside upper left", ncols=3, frameon=False)
    drawn.savefig(path, dpi=160)


def _panel(axes: Axes, results: Sequence[Measured]) -> None:
    """One line for each form with orthogonal rows, a thin one with independent rows, quartiles as a shade."""
    for number, form in enumerate(get_args(Form)):
        for orthogonal in (True, False):
            line = [r for r in results if r.setting[3:] == (form, orthogonal, "chi")]
            x = [r.setting.features for r in line]
            axes.plot(
                x,
                [r.median for r in line],
                color=COLOURS[number],
                marker=MARKERS[number] if orthogonal else None,
                markersize=5,
                markeredgecolor="white",
                linestyle="-" if orthogonal else ":",
                label=f"{form}, {'orthogonal' if orthogonal else 'independent'}",
            )
            if orthogonal:
                axes.fill_between(
                    x, [r.lower for r in line], [r.upper for r in line], color=COLOURS[number], alpha=0.15, linewidth=0
                )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(x, [str(value) for value in x], fontsize="small")
    clear(axes)


def _short(error: float) -> str:
    return f"{error:.3f}" if error < 1000 else f"{error:.0e}"
