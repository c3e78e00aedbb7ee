"""Attentions trained on associative recall: how many pairs fit into a state of which width."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lmlong.attention.plugins import plugin_hashes
from lmlong.experiments.kept_results import KeptResult
from lmlong.experiments.recall_grid import RecallGrid
from lmlong.experiments.recall_model import (
    TESTS,
    RecallScore,
    answers_of,
    one_thread,
    recall_options,
    recall_scores,
    train_recall,
)
from lmlong.model.base import count_parameters
from lmlong.model.state_size import binary_size, state_size
from lmlong.report.figure import Figure, Panel, lines_of
from lmlong.report.json_values import json_values
from lmlong.report.table import Column, format_table


class RecallResult(NamedTuple):
    """The scores of one model."""

    candidate: str
    width: int
    rate: float
    seed: int
    parameters: int
    state_bytes: int  # after the longest row
    scores: list[RecallScore]  # by number of pairs

    @property
    def mean(self) -> float:
        """The mean of the accuracies over the numbers of pairs."""
        return sum(score.accuracy for score in self.scores) / len(self.scores)


@one_thread()
def study_recall(
    grid: RecallGrid, names: Sequence[str], seed: int, out: Path
) -> tuple[list[RecallResult], list[RecallResult]]:
    """Return the best model of each candidate and width, and all models; those kept in `out` are not trained again."""
    models = [(name, width) for name in names for width in grid.widths]
    for name, width in models:
        recall_options(name, width)  # raises for a model that cannot be built, before any is trained
    best, runs = [], []
    for name, width in models:
        tried: list[RecallResult] = []
        for rate in grid.rates:
            tried.append(trained_recall(grid, name, width, rate, seed, out))
            if tried[-1].mean == 1:
                break  # it answers every query
        best.append(max(tried, key=lambda run: run.mean))
        runs += tried
    return best, runs


def trained_recall(grid: RecallGrid, name: str, width: int, rate: float, seed: int, out: Path) -> RecallResult:
    """Train and score a model, unless `out` holds its result for the same settings."""
    options = recall_options(name, width)
    settings = {
        "grid": grid._replace(widths=(width,), rates=(rate,))._asdict(),
        "model": options.model_dump(),
        "seed": seed,
        "tests": TESTS,
        **plugin_hashes(options.attention),
    }

    def train_and_score() -> dict[str, Any]:
        model = train_recall(grid, options, rate, seed)
        state = state_size(model)
        size = state.empty.bytes + grid.tokens_per_pair * max(grid.pairs) * state.per_token.bytes
        scores = recall_scores(partial(answers_of, model), grid, seed)
        recalled = ", ".join(f"{score.accuracy:.3f} of {score.pairs}" for score in scores)
        print(f"{name}, width {width}, learning rate {rate:g}: recalls {recalled} pairs", file=sys.stderr)
        return json_values(RecallResult(name, width, rate, seed, count_parameters(model), size, scores))

    values = KeptResult(out, f"{name}-{width}-{rate:g}-{seed}", settings).get(train_and_score)
    return RecallResult(**{**values, "scores": [RecallScore(**score) for score in values["scores"]]})


def table(best: Sequence[RecallResult]) -> str:
    """Return the share of queries answered by candidate and width, for an 80-column terminal."""
    columns = [
        Column("attention", 18, align="<"),
        Column("width", 5),
        Column("state", 11, binary_size),
        Column("rate", 8, "g"),
        *(Column(str(score.pairs), 6, ".3f") for score in best[0].scores),
    ]
    rows = [
        [run.candidate, run.width, run.state_bytes, run.rate, *(score.accuracy for score in run.scores)] for run in best
    ]
    return "\n".join([f"{'':<42}share of queries answered, by pairs", *format_table(columns, rows)])


def figure(best: Sequence[RecallResult]) -> Figure:
    """Return the share answered against the number of pairs: a panel for each width, a line for each candidate."""
    names = list(dict.fromkeys(result.candidate for result in best))
    panels = []
    for width in sorted({result.width for result in best}):
        groups = {
            name: [
                score for result in best if (result.candidate, result.width) == (name, width) for score in result.scores
            ]
            for name in names
        }
        panels.append(
            Panel(
                [line for line in lines_of(groups, "pairs", "accuracy") if len(line.x)],
                title=f"width {width}",
                x_label="pairs",
                y_label="share of queries answered",
                ticks=[score.pairs for score in best[0].scores],
                y_range=(0, 1.03),
            )
        )
    size = (1.5 + 3.6 * len(panels), 4.6)
    return Figure([panels], size=size, share_y=True, legend_columns=min(len(names), 2 + len(panels)))
