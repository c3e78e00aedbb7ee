"""The error of random features against softmax attention: by number and form of the features, by size of the inputs.

S seeds, T tokens, D width, M features.
"""

import statistics
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lmlong.attention.base import causal_mask
from lmlong.attention.favor import Norms, draw_projection
from lmlong.attention.linear.naive import quadratic
from lmlong.report.figure import COLORS, MARKERS, Figure, Line, Panel, Style
from lmlong.report.json_values import json_keys
from lmlong.report.progress import each
from lmlong.report.table import Column, format_table

Form = Literal["positive", "hyperbolic", "trig"]

WIDTHS = (16, 64)
DEVIATIONS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
FEATURES = (16, 32, 64, 128, 256)
TOKENS = 128


class FeatureSetting(NamedTuple):
    """One kind of random features, and its inputs."""

    width: int
    deviation: float  # of the entries of queries and keys
    features: int  # the same width for each form, so trig and hyperbolic draw half as many rows
    form: Form
    orthogonal: bool
    norms: Norms


@json_keys("*setting", "median", "lower_quartile=lower", "upper_quartile=upper")
class FeatureError(NamedTuple):
    """The error of causal attention's outputs relative to their norm, over the seeds."""

    setting: FeatureSetting
    median: float
    lower: float  # quartiles
    upper: float


def study_approximation(
    seeds: int = 40,
    widths: Sequence[int] = WIDTHS,
    deviations: Sequence[float] = DEVIATIONS,
    features: Sequence[int] = FEATURES,
) -> list[FeatureError]:
    """Measure every form, with orthogonal and independent rows of every kind of norm; each seed has its own inputs."""
    forms: tuple[Form, ...] = get_args(Form)
    norms: tuple[Norms, ...] = get_args(Norms)
    settings = [
        FeatureSetting(*values) for values in product(widths, deviations, features, forms, (True, False), norms)
    ]
    return [measure_error(setting, seeds) for setting in each(settings, "random features", len(settings), "settings")]


def measure_error(setting: FeatureSetting, seeds: int) -> FeatureError:
    """Measure the errors of one setting."""
    q, k, v = _inputs(setting, seeds)
    mask = causal_mask(TOKENS, q.device)
    truth = (q @ k.mT / setting.width**0.5).masked_fill(~mask, -torch.inf).softmax(-1) @ v
    rows = torch.stack([_rows(setting, seed) for seed in range(seeds)])[:, None]
    scale = setting.width**-0.25
    features = _features(q * scale, rows, setting.form), _features(k * scale, rows, setting.form)
    errors = (quadratic(*features, v) - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)
    lower, median, upper = errors.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=errors.dtype)).tolist()
    return FeatureError(setting, median, lower, upper)


def _inputs(setting: FeatureSetting, seeds: int) -> Iterator[Tensor]:
    """Yield queries, keys and values (S, 1, T, D), the same for every form; for each seed by a generator of its own."""
    for part in range(3):
        drawn = torch.stack(
            [
                torch.randn(
                    TOKENS, setting.width, generator=torch.Generator().manual_seed(3 * seed + part), dtype=torch.float64
                )
                for seed in range(seeds)
            ]
        )
        yield drawn[:, None] * (1.0 if part == 2 else setting.deviation)


def _rows(setting: FeatureSetting, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(1_000_003 + seed)
    count = setting.features if setting.form == "positive" else setting.features // 2
    return draw_projection(count, setting.width, setting.norms, draw, setting.orthogonal)


def _features(x: Tensor, rows: Tensor, form: Form) -> Tensor:
    """Return one of the three forms as in its paper, without a constant factor, which cancels."""
    u, half_square = x @ rows.mT, x.square().sum(-1, keepdim=True) / 2
    if form == "positive":
        return (u - half_square).exp()
    if form == "hyperbolic":
        return torch.cat([u, -u], dim=-1).sub(half_square).exp()
    return torch.cat([u.cos(), u.sin()], dim=-1) * half_square.exp()


class ApproximationCase(NamedTuple):
    """The errors at one width and deviation, with the largest number of features that was tried."""

    width: int
    deviation: float
    forms: dict[str, float]  # orthogonal rows, chi norms
    norms: dict[str, float]  # positive features, orthogonal rows
    gain: float  # error of independent rows over that of orthogonal ones: positive, chi; the median over all numbers

    @property
    def winner(self) -> str:
        return min(self.forms, key=lambda form: self.forms[form])


def approximation_cases(results: Sequence[FeatureError]) -> list[ApproximationCase]:
    """Return a summary for each width and deviation."""
    median = {result.setting: result.median for result in results}
    numbers = sorted({setting.features for setting in median})
    cases = []
    for width, deviation in sorted({(setting.width, setting.deviation) for setting in median}):

        def of(features: int, form: Form, orthogonal: bool = True, norms: Norms = "chi") -> float:
            return median[FeatureSetting(width, deviation, features, form, orthogonal, norms)]  # noqa: B023

        gains = [of(m, "positive", orthogonal=False) / of(m, "positive") for m in numbers]
        forms = {form: of(numbers[-1], form) for form in get_args(Form)}
        norms = {norms: of(numbers[-1], "positive", norms=norms) for norms in get_args(Norms)}
        cases.append(ApproximationCase(width, deviation, forms, norms, statistics.median(gains)))
    return cases


DRAWN_DEVIATIONS = (0.25, 0.5, 1.0, 1.5)
HIGHEST = 3.0
"""Larger errors leave the plot: at 1 the approximation is worth no more than answering 0."""


def _short(error: float) -> str:
    return f"{error:.3f}" if error < 1000 else f"{error:.0e}"


COLUMNS = [
    Column("width", 5, value="width"),
    Column("inputs", 8, ".2f", value="deviation"),
    Column("positive", 10, ".3f", value=lambda case: case.forms["positive"]),
    Column("hyperbolic", 11, ".3f", value=lambda case: case.forms["hyperbolic"]),
    Column("trig", 8, _short, value=lambda case: case.forms["trig"]),
    Column("  winner", 13, align="<", value=lambda case: f"  {case.winner}"),
    Column("gain", 6, ".3f", value="gain"),
    Column("fixed", 8, ".3f", value=lambda case: case.norms["fixed"]),
    Column("quantile", 10, ".3f", value=lambda case: case.norms["quantile"]),
]


def table(results: Sequence[FeatureError]) -> str:
    """Return for an 80-column terminal where each form wins, and the effect of orthogonal rows and of their norms."""
    most = max(result.setting.features for result in results)
    lines = [
        f"relative error of causal attention with {most} features, median over the seeds",
        "",
        f"{'':14}{'orthogonal rows, chi norms':<34}{'':6}positive, orthogonal",
        *format_table(COLUMNS, approximation_cases(results)),
        "",
        "gain: error of independent rows over that of orthogonal ones, positive, chi;",
        "      the median over all numbers of features",
    ]
    return "\n".join(lines)


def figure(results: Sequence[FeatureError]) -> Figure:
    """Return error against number of features: a row for each width, a column for some deviations."""
    widths = sorted({result.setting.width for result in results})
    deviations = sorted({result.setting.deviation for result in results})
    deviations = [value for value in deviations if value in DRAWN_DEVIATIONS] or deviations
    rows = [[_panel(results, width, deviation) for deviation in deviations] for width in widths]
    size = (2.3 * len(deviations) + 0.8, 2.6 * len(widths) + 0.6)
    return Figure(rows, size, share_x=True, share_y=True, legend_columns=3)


def _panel(results: Sequence[FeatureError], width: int, deviation: float) -> Panel:
    """Return a line for each form with orthogonal rows, with a band of quartiles, and one with independent rows."""
    lines = []
    for number, (form, orthogonal) in enumerate(product(get_args(Form), (True, False))):
        setting = (width, deviation, form, orthogonal, "chi")
        some = [result for result in results if (*result.setting[:2], *result.setting[3:]) == setting]
        color, marker = COLORS[number // 2], MARKERS[number // 2]
        lines.append(
            Line(
                f"{form}, {'orthogonal' if orthogonal else 'independent'}",
                [result.setting.features for result in some],
                [result.median for result in some],
                Style(color, "-", marker, marker_size=5) if orthogonal else Style(color, ":"),
                [result.lower for result in some] if orthogonal else None,
                [result.upper for result in some] if orthogonal else None,
            )
        )
    return Panel(
        lines,
        title=f"width {width}, deviation {deviation:g}",
        x_label="features",
        y_label="relative error",
        ticks=sorted({result.setting.features for result in results}),
        small=True,
        y_range=(None, HIGHEST),
        y_scale="log",
    )
