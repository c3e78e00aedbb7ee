"""Attentions trained alike: on the same text and tokens, with the same learning rates, and several seeds."""

import json
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from string import ascii_lowercase
from typing import Any, NamedTuple

from lmlong.attention.plugins import load_plugin, plugin_hashes
from lmlong.data.token_dataset import prepare
from lmlong.errors import DivergedError
from lmlong.experiments.kept_results import KeptResult
from lmlong.inference.loading import load
from lmlong.model.base import count_parameters
from lmlong.model.state_size import binary_size, state_size
from lmlong.recipe import Recipe
from lmlong.recipe import file as recipe_file
from lmlong.recipe.candidates import candidates
from lmlong.report.figure import Figure, Line, Panel, style
from lmlong.report.table import Column, format_table
from lmlong.training.metrics_log import last_validation, read_entries
from lmlong.training.run import train

BEYOND = 4
"""Largest number of learning rates that are tried beyond the given ones."""


class ComparedRun(NamedTuple):
    """The result of one run."""

    candidate: str
    rate: float
    seed: int
    bits_per_byte: float
    tokens: int
    tokens_per_second: float
    parameters: int
    state_bytes: int  # after a training sequence


class CandidateResult(NamedTuple):
    """One candidate at its best learning rate, over all seeds."""

    name: str
    runs: list[ComparedRun]

    @property
    def first(self) -> ComparedRun:
        """The run of the first seed, for what all runs have in common."""
        return self.runs[0]

    @property
    def mean(self) -> float:
        return statistics.mean(run.bits_per_byte for run in self.runs)

    @property
    def spread(self) -> float:
        """The standard deviation over the seeds; 0 for a single one."""
        return statistics.stdev(run.bits_per_byte for run in self.runs) if len(self.runs) > 1 else 0.0

    @property
    def speed(self) -> float:
        """The median of the tokens per second."""
        return statistics.median(run.tokens_per_second for run in self.runs)

    @property
    def state(self) -> str:
        return binary_size(self.first.state_bytes)


COLUMNS = [
    Column("attention", 20, align="<", value="name"),
    Column("bits/byte", 10, ".4f", value="mean"),
    Column("spread", 9, ".4f", value="spread"),
    Column("rate", 9, "g", value="first.rate"),
    Column("parameters", 12, ",", value="first.parameters"),
    Column("tokens/s", 10, ",.0f", value="speed"),
    Column("state", 10, value="state"),
]


def compare_attentions(
    recipe: str, overrides: Sequence[str], names: Sequence[str], rates: Sequence[float], seeds: int, out: Path
) -> tuple[list[CandidateResult], list[ComparedRun]]:
    """Return the results and all runs; each run has a folder under `out`, and is resumed or reused if it exists.

    The learning rate is chosen with the first seed, from `rates` and further ones until the best is not at an end; the
    other seeds run at the best rate only.
    """
    results, runs = [], []
    for name in names:
        first = [trained_run(recipe, overrides, name, rate, 0, out) for rate in sorted(rates)]
        while len(first) < len(rates) + BEYOND and (beyond := _rate_beyond(first)) is not None:
            try:
                first.append(trained_run(recipe, overrides, name, beyond, 0, out))
            except DivergedError:
                break  # no better than what was tried
        best = min(first, key=lambda run: run.bits_per_byte)
        more = [trained_run(recipe, overrides, name, best.rate, seed, out) for seed in range(1, seeds)]
        results.append(CandidateResult(name, [best, *more]))
        runs += [*first, *more]
    return results, runs


def _rate_beyond(tried: Sequence[ComparedRun]) -> float | None:
    """Return the next learning rate beyond the best of several, if that is at an end; else None."""
    if len(tried) == 1:
        return None
    lowest, *between, highest = sorted(tried, key=lambda run: run.rate)
    if highest.bits_per_byte < min(run.bits_per_byte for run in (lowest, *between)):
        return highest.rate * 2
    return lowest.rate / 2 if lowest.bits_per_byte < min(run.bits_per_byte for run in (*between, highest)) else None


def trained_run(recipe: str, overrides: Sequence[str], name: str, rate: float, seed: int, out: Path) -> ComparedRun:
    """Train a candidate, unless `out` holds its run."""
    options = [f"model.attention.{key}={value}" for key, value in candidates()[name].items()]
    changes = [*overrides, *options, f"training.learning_rate={rate}", f"seed={seed}"]
    chosen = recipe_file.load(recipe, changes, load_plugin)
    settings = {
        "recipe": chosen.model_dump(),
        "text": prepare(chosen.text).identity,
        **plugin_hashes(chosen.model.attention),
    }
    kept = KeptResult(out, f"{name}-{rate:g}-{seed}", settings)

    def train_and_measure() -> dict[str, Any]:
        print(f"{name}, learning rate {rate:g}, seed {seed}", file=sys.stderr)
        train(chosen, kept.folder, resume="auto")  # raises if a signal stops it
        return ComparedRun(name, rate, seed, *_measured(kept.folder, chosen))._asdict()

    return ComparedRun(**kept.get(train_and_measure))


def _measured(folder: Path, recipe: Recipe) -> tuple[float, int, float, int, int]:
    """Return the metrics of a finished run; its speed is the median of its log, which pauses do not distort."""
    lines = read_entries(folder / "metrics.jsonl")
    validation = last_validation(lines)
    assert validation is not None
    speed = statistics.median(line["tokens_per_second"] for line in lines if "tokens_per_second" in line)
    training, length = recipe.training, recipe.text.sequence_length
    tokens = lines[-1]["step"] * training.batch_size * training.accumulate * length
    model = load(folder, state_dtype="32").model
    state = state_size(model)
    return (
        validation["bits_per_byte"],
        tokens,
        speed,
        count_parameters(model),
        state.empty.bytes + length * state.per_token.bytes,
    )


def table(results: Sequence[CandidateResult]) -> str:
    """Return a line for each candidate, the best first, for an 80-column terminal."""
    return "\n".join(format_table(COLUMNS, _best_first(results)))


def figure(results: Sequence[CandidateResult]) -> Figure:
    """Return a line for each candidate, the best on top: a point for each seed, and their mean."""
    ranked = _best_first(results)
    seed = style(0)._replace(dashes="", marker_size=6)
    mean = style(1)._replace(dashes="", marker="D", marker_size=11, hollow=True)
    x, y = zip(*((run.bits_per_byte, row) for row, result in enumerate(ranked) for run in result.runs), strict=True)
    panel = Panel(
        [Line("mean", [result.mean for result in ranked], range(len(ranked)), mean), Line("one seed", x, y, seed)],
        x_label="bits per byte, less is better",
        y_names=[f"{result.name}, {result.state}" for result in ranked],
        legend=True,
    )
    return Figure([[panel]], size=(8.0, 1.2 + 0.32 * len(ranked)))


def _best_first(results: Sequence[CandidateResult]) -> list[CandidateResult]:
    return sorted(results, key=lambda result: result.mean)


def write_copies(path: Path, documents: int = 4000, block: int = 100, times: int = 5, seed: int = 0) -> None:
    """Write a .jsonl of documents, each a block of random letters on a line, the same line several times.

    The first line costs any model log2(26) bits a letter; a model that remembers it predicts all others.
    """
    draw = random.Random(seed)
    lines = ("".join(draw.choices(ascii_lowercase, k=block)) + "\n" for _ in range(documents))
    path.write_text("".join(json.dumps({"text": line * times}) + "\n" for line in lines), encoding="utf-8")
