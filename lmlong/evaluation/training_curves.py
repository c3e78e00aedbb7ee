"""Panels of a run's training: loss by step and by time, learning rate, gradient norm, and the health of its states."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lmlong.recipe import Recipe
from lmlong.report.figure import Line, Numbers, Panel, style

POINTS = 200
"""The largest number of points of a line; more are averaged."""
UNITS = {"seconds": 1, "minutes": 60, "hours": 3600}


def time_unit(seconds: float) -> str:
    """Return the largest unit of which there are at least two."""
    return next((unit for unit, size in reversed(UNITS.items()) if seconds >= 2 * size), "seconds")


class TrainingCurves(NamedTuple):
    """The metrics of a run: what training steps and validations logged, and the time of each training step."""

    name: str
    recipe: Recipe
    steps: list[dict[str, Any]]
    seconds: np.ndarray  # since the beginning, by `training.clock`, from the speeds of the logged steps
    validations: list[dict[str, Any]]

    @classmethod
    def of(cls, name: str, recipe: Recipe, metrics: Sequence[dict[str, Any]]) -> "TrainingCurves":
        steps = [entry for entry in metrics if "loss" in entry and entry.get("tokens_per_second")]
        counts = np.diff([entry["step"] for entry in steps], prepend=0) * recipe.tokens_per_step
        seconds = np.cumsum(counts / np.array([entry["tokens_per_second"] for entry in steps]))
        validations = [{"step": entry["step"], **entry["validation"]} for entry in metrics if "validation" in entry]
        return cls(name, recipe, steps, seconds, validations)

    def time_at(self, steps: Numbers) -> np.ndarray:
        """Return the seconds at some steps."""
        known = [entry["step"] for entry in self.steps]
        return np.interp(steps, [0, *known], [0.0, *self.seconds])


def training_panels(runs: Sequence[TrainingCurves]) -> list[Panel]:
    """Return the curves of all runs, each run in one color, solid in training and dashed in validation."""
    entries = [entry for run in runs for entry in (*run.steps, *run.validations)]
    in_bits = all("bits_per_byte" in entry for entry in entries)
    keys = ("bits_per_byte", "bits_per_byte") if in_bits else ("loss", "nats_per_token")
    label = "bits per byte" if in_bits else "nats per token"
    longest = max((run.seconds[-1] for run in runs if len(run.seconds)), default=0.0)
    unit = time_unit(longest)
    clocks = " or ".join(dict.fromkeys(f"{run.recipe.training.clock} clock" for run in runs))
    by_step = [line for number, run in enumerate(runs) for line in _losses(run, number, *keys)]
    both = [run for run in runs for _ in range(2)]
    by_time = [line._replace(x=run.time_at(line.x) / UNITS[unit]) for run, line in zip(both, by_step, strict=True)]
    panels = [
        Panel(by_step, "Loss by step", "optimizer step", label),
        Panel(by_time, "Loss by time", f"{unit} of training steps, {clocks}", label),
        *(
            Panel(
                [_of_steps(run, key, number, run.name) for number, run in enumerate(runs)], title, "optimizer step", y
            )
            for title, key, y in (
                ("Learning rate", "learning_rate", "learning rate"),
                ("Norm of the gradient", "gradient_norm", "norm before clipping"),
            )
        ),
    ]
    return [panel for panel in panels if any(len(line.x) for line in panel.lines)]


def _losses(run: TrainingCurves, number: int, training: str, validation: str) -> list[Line]:
    look = style(number)._replace(dashes="--", marker_size=5)
    steps, losses = [entry["step"] for entry in run.validations], [_value(each, validation) for each in run.validations]
    measured = _thinned(Line(f"{run.name}, validation", steps, losses, look))
    return [_of_steps(run, training, number, f"{run.name}, training"), measured]


def _of_steps(run: TrainingCurves, key: str, number: int, label: str) -> Line:
    """Return a line through one metric of the training steps."""
    steps, values = [entry["step"] for entry in run.steps], [_value(entry, key) for entry in run.steps]
    return _thinned(Line(label, steps, values, style(number)._replace(dashes="-", marker=None)))


def _thinned(line: Line) -> Line:
    """Return a line of up to POINTS points, each the mean of those that it stands for, at the last of them."""
    parts = np.array_split(np.arange(len(line.x)), min(POINTS, len(line.x)) or 1)
    xs, ys = np.asarray(line.x), np.asarray(line.y)
    parts = [part for part in parts if len(part)]
    return line._replace(x=[xs[part[-1]].item() for part in parts], y=[float(ys[part].mean()) for part in parts])


def _value(entry: dict[str, Any], key: str) -> float:
    value = entry.get(key)
    return math.nan if value is None else float(value)
