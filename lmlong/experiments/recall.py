"""Attentions trained on associative recall: how many pairs fit into a state of which width."""

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from operator import itemgetter
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
    scores: dict[int, RecallScore]  # by number of pairs

    @property
    def mean(self) -> float:
        """The mean of the accuracies over the numbers of pairs."""
        return sum(score.accuracy for score in self.scores.values()) / len(self.scores)


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
        tried = list(search(grid, name, width, seed, out))
        best.append(max(tried, key=lambda run: run.mean))
        runs += tried
    return best, runs


def search(grid: RecallGrid, name: str, width: int, seed: int, out: Path) -> Iterator[RecallResult]:
    """Yield a model for each learning rate, and stop after one that answers every query."""
    for rate in grid.rates:
        run = trained_recall(grid, name, width, rate, seed, out)
        yield run
        if run.mean == 1:
            return


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
        recalled = ", ".join(f"{score.accuracy:.3f} of {pairs}" for pairs, score in scores.items())
        print(f"{name}, width {width}, learning rate {rate:g}: recalls {recalled} pairs", file=sys.stderr)
        return to_json(RecallResult(name, width, rate, seed, count_parameters(model), size, scores))

    return _from_json(KeptResult(out, f"{name}-{width}-{rate:g}-{seed}", settings).get(train_and_score))


def to_json(result: RecallResult) -> dict[str, Any]:
    """Return the result of a model, its scores as a list."""
    scores = [{"pairs": pairs, **score._asdict()} for pairs, score in result.scores.items()]
    return json_values({**result._asdict(), "scores": scores})


def _from_json(values: dict[str, Any]) -> RecallResult:
    scores = {line["pairs"]: RecallScore(line["right"], line["asked"]) for line in values["scores"]}
    return RecallResult(**{**values, "scores": scores})


def table(best: Sequence[RecallResult]) -> str:
    """Return the share of queries answered by candidate and width, for an 80-column terminal."""
    numbers = list(best[0].scores)
    columns = [
        Column("attention", 18, align="<"),
        Column("width", 5),
        Column("state", 11, binary_size),
        Column("rate", 8, "g"),
        *(Column(str(pairs), 6, ".3f") for pairs in numbers),
    ]
    rows = [
        [run.candidate, run.width, run.state_bytes, run.rate, *(run.scores[pairs].accuracy for pairs in numbers)]
        for run in best
    ]
    return "\n".join([f"{'':<42}share of queries answered, by pairs", *format_table(columns, rows)])


def figure(best: Sequence[RecallResult]) -> Figure:
    """Return the share answered against the number of pairs: a panel for each width, a line for each candidate."""
    names = list(dict.fromkeys(result.candidate for result in best))
    panels = []
    for width in sorted({result.width for result in best}):
        groups = {
            name: [
                (pairs, score.accuracy)
                for result in best
                if (result.candidate, result.width) == (name, width)
                for pairs, score in result.scores.items()
            ]
            for name in names
        }
        panels.append(
            Panel(
                [line for line in lines_of(groups, itemgetter(0), itemgetter(1)) if len(line.x)],
                title=f"width {width}",
                x_label="pairs",
                y_label="share of queries answered",
                ticks=list(best[0].scores),
                y_range=(0, 1.03),
            )
        )
    size = (1.5 + 3.6 * len(panels), 4.6)
    return Figure([panels], size=size, share_y=True, legend_columns=min(len(names), 2 + len(panels)))
