"""The learning curve of a run as a figure: its loss on training and validation text against the tokens trained on."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmlong.model.metrics import Metric
from lmlong.report.figure import Figure, Level, Line, Panel, Style, style

TRAINING = Style("0.75")


def learning_curve(
    entries: Sequence[dict[str, Any]],
    metric: Metric,
    tokens_at: Callable[[int], int],
    baselines: Mapping[str, float],
) -> Figure | None:
    """Return the curve of the entries of a metrics log, which hold all of a run that was gone on with; None without a
    validation.

    `tokens_at` gives the tokens trained on after a step.
    """
    training = [(entry["step"], entry[metric.name]) for entry in entries if entry.get(metric.name) is not None]
    validation = [
        (entry["step"], entry["validation"][metric.name])
        for entry in entries
        if metric.name in entry.get("validation", {})
    ]
    if not validation:
        return None
    lines = [
        _line("training", training, tokens_at, TRAINING),
        _line("validation sample", validation, tokens_at, style(0)),
    ]
    levels = [Level(bits, style(number), label=name) for number, (name, bits) in enumerate(baselines.items(), 1)]
    panel = Panel(
        lines[0 if training else 1 :],
        x_label="tokens trained on",
        y_label=metric.unit,
        levels=levels,
        y_scale="linear" if metric.name == "bits_per_byte" else "log",
    )
    return Figure([[panel]], size=(8, 5), legend_columns=5)


def _line(label: str, points: Sequence[tuple[int, float]], tokens_at: Callable[[int], int], looks: Style) -> Line:
    return Line(label, [tokens_at(step) for step, _ in points], [value for _, value in points], looks)
