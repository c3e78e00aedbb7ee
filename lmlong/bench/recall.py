"""Every attention trained to recall: how many pairs fit into a state of which width."""

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lmlong.bench.kept import Kept
from lmlong.bench.recall_data import Score
from lmlong.bench.recall_grid import Grid
from lmlong.bench.recall_model import TESTS, likeliest, measure, model_options, one_thread, train
from lmlong.inference.state_size import state_size
from lmlong.model.language_model import parameters


class Trained(NamedTuple):
    """One model and what it recalls."""

    contestant: str
    width: int
    rate: float
    seed: int
    parameters: int
    state_bytes: int  # after the longest row
    scores: dict[int, Score]  # by number of pairs

    @property
    def mean(self) -> float:
        """The mean of the accuracies, every number of pairs counting alike."""
        return sum(score.accuracy for score in self.scores.values()) / len(self.scores)


@one_thread()
def compare(grid: Grid, names: Sequence[str], seed: int, out: Path) -> tuple[list[Trained], list[Trained]]:
    """The best model of each contestant and width, and all models; what `out` holds already is not trained again."""
    models = [(name, width) for name in names for width in grid.widths]
    for name, width in models:
        model_options(name, width)  # what cannot be built is refused before the first is trained
    best, runs = [], []
    for name, width in models:
        tried = list(search(grid, name, width, seed, out))
        best.append(max(tried, key=lambda run: run.mean))
        runs += tried
    return best, runs


def search(grid: Grid, name: str, width: int, seed: int, out: Path) -> Iterator[Trained]:
    """A model for each learning rate, up to one that answers everything: none could be better."""
    for rate in grid.rates:
        run = trained(grid, name, width, rate, seed, out)
        yield run
        if run.mean == 1:
            return


def trained(grid: Grid, name: str, width: int, rate: float, seed: int, out: Path) -> Trained:
    """Train and measure a model, unless `out` holds what came of it with the same settings."""
    options = model_options(name, width)
    made_of = {
        "grid": grid._replace(widths=(width,), rates=(rate,))._asdict(),
        "model": options.model_dump(),
        "seed": seed,
        "tests": TESTS,
    }

    def made() -> dict[str, Any]:
        model = train(grid, options, rate, seed)
        state = state_size(model)
        size = state.empty.bytes + grid.tokens_per_pair * max(grid.pairs) * state.per_token.bytes
        scores = measure(partial(likeliest, model), grid, seed)
        recalled = ", ".join(f"{score.accuracy:.3f} of {pairs}" for pairs, score in scores.items())
        print(f"{name}, width {width}, learning rate {rate:g}: recalls {recalled} pairs", file=sys.stderr)
        return plain(Trained(name, width, rate, seed, parameters(model), size, scores))

    return _from_plain(Kept(out, f"{name}-{width}-{rate:g}-{seed}", made_of).get(made))


def plain(run: Trained) -> dict[str, Any]:
    """A model's result as JSON holds it."""
    scores = [{"pairs": pairs, **score._asdict()} for pairs, score in run.scores.items()]
    return {**run._asdict(), "scores": scores}


def _from_plain(values: dict[str, Any]) -> Trained:
    scores = {line["pairs"]: Score(line["right"], line["asked"]) for line in values["scores"]}
    return Trained(**{**values, "scores": scores})


def table(best: Sequence[Trained]) -> str:
    """The share of queries answered, by contestant and width, for each number of pairs; for an 80-column terminal."""
    numbers = list(best[0].scores)
    lines = [f"{'':<42}share of queries answered, by pairs", f"{'attention':<18}{'width':>5}{'state':>11}{'rate':>8}"]
    lines[1] += "".join(f"{pairs:>6}" for pairs in numbers)
    for run in best:
        recalled = "".join(f"{run.scores[pairs].accuracy:>6.3f}" for pairs in numbers)
        lines.append(f"{run.contestant:<18}{run.width:>5}{run.state_bytes / 1024:>7.1f} KiB{run.rate:>8g}{recalled}")
    return "\n".join(lines)
