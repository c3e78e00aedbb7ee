"""Attentions trained alike: same text, same tokens, same learning rates to choose from, several seeds."""

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lmlong.attention.plugins import load_plugin, plugin_hashes
from lmlong.data.token_dataset import prepare
from lmlong.errors import DivergedError
from lmlong.experiments.kept_results import KeptResult
from lmlong.inference.loading import load
from lmlong.model.base import count_parameters
from lmlong.model.state_size import state_size
from lmlong.recipe import Recipe
from lmlong.recipe import file as recipe_file
from lmlong.recipe.kinds import plugin_candidates
from lmlong.training.metrics_log import last_validation, read_entries
from lmlong.training.run import train

CANDIDATES = {
    "softmax": ["kind=softmax"],
    "window": ["kind=window", "window=64"],
    "elu": ["kind=linear", "feature_map=elu", "decay=none"],
    "relu": ["kind=linear", "feature_map=relu", "decay=none"],
    "cosine": ["kind=linear", "feature_map=cosine", "decay=none"],
    "softmax-features": ["kind=linear", "feature_map=softmax", "decay=none"],
    "taylor": ["kind=linear", "feature_map=taylor", "decay=none"],
    "favor": ["kind=linear", "feature_map=favor", "decay=none"],
    "elu-learned": ["kind=linear", "feature_map=elu", "decay=learned"],
    "elu-channel": ["kind=linear", "feature_map=elu", "decay=channel"],
    "delta": ["kind=delta", "decay=learned"],
    "elu-learned-window": ["kind=3linear+window", "feature_map=elu", "decay=learned", "window=64"],
    "elu-learned-softmax": ["kind=3linear+softmax", "feature_map=elu", "decay=learned"],
    "delta-softmax": ["kind=3delta+softmax", "decay=learned"],
    "delta-window": ["kind=3delta+window", "decay=learned", "window=64"],
    "elu-learned-ngram": ["kind=linear+ngram+2linear", "feature_map=elu", "decay=learned"],
    "elu-channel-ngram": ["kind=linear+ngram+2linear", "feature_map=elu", "decay=channel"],
    "delta-ngram": ["kind=delta+ngram+2delta", "decay=learned"],
    "delta-window-ngram": ["kind=delta+ngram+delta+window", "decay=learned", "window=64"],
}
"""What is compared, by name: options below model.attention."""


BEYOND = 4
"""Most learning rates that are tried beyond the given ones."""


def candidates() -> dict[str, list[str]]:
    """Return what can be compared: `CANDIDATES`, and the attentions and feature maps of plug-ins."""
    of_plugins = plugin_candidates().items()
    return CANDIDATES | {name: [f"{key}={value}" for key, value in options.items()] for name, options in of_plugins}


class ComparedRun(NamedTuple):
    """The result of one run."""

    candidate: str
    rate: float
    seed: int
    bits_per_byte: float
    tokens: int
    tokens_per_second: float
    parameters: int
    state_bytes: int  # after as many tokens as a training sequence has


class CandidateResult(NamedTuple):
    """One candidate at its best learning rate, over all seeds."""

    name: str
    runs: list[ComparedRun]

    @property
    def mean(self) -> float:
        return statistics.mean(run.bits_per_byte for run in self.runs)

    @property
    def spread(self) -> float:
        """The standard deviation over the seeds; 0 for a single one."""
        return statistics.stdev(run.bits_per_byte for run in self.runs) if len(self.runs) > 1 else 0.0


def compare_attentions(
    recipe: str, overrides: Sequence[str], names: Sequence[str], rates: Sequence[float], seeds: int, out: Path
) -> tuple[list[CandidateResult], list[ComparedRun]]:
    """Return the results and all runs; each run has a folder under `out`, and is continued or reused if it exists.

    The learning rate is chosen by the first seed, from `rates` and as many beyond them as it takes until the best is
    not at an end; the others run at the best one only.
    """
    results, runs = [], []
    for name in names:
        first = [trained_run(recipe, overrides, name, rate, 0, out) for rate in sorted(rates)]
        while len(first) < len(rates) + BEYOND and (beyond := _rate_beyond(first)) is not None:
            try:
                first.append(trained_run(recipe, overrides, name, beyond, 0, out))
            except DivergedError:
                break  # no better than what was tried
        best = min(first, key=_bits_per_byte)
        more = [trained_run(recipe, overrides, name, best.rate, seed, out) for seed in range(1, seeds)]
        results.append(CandidateResult(name, [best, *more]))
        runs += [*first, *more]
    return results, runs


def _rate_beyond(tried: Sequence[ComparedRun]) -> float | None:
    """Return the next learning rate beyond an end at which the best of several was; None if it was between others."""
    if len(tried) == 1:
        return None
    lowest, *others, highest = sorted(tried, key=lambda run: run.rate)
    if highest.bits_per_byte < min(map(_bits_per_byte, (lowest, *others))):
        return highest.rate * 2
    return lowest.rate / 2 if lowest.bits_per_byte < min(map(_bits_per_byte, (*others, highest))) else None


def _bits_per_byte(run: ComparedRun) -> float:
    return run.bits_per_byte


def trained_run(recipe: str, overrides: Sequence[str], name: str, rate: float, seed: int, out: Path) -> ComparedRun:
    """Train a candidate, unless `out` holds its run."""
    options = [f"model.attention.{option}" for option in candidates()[name]]
    changes = [*overrides, *options, f"training.learning_rate={rate}", f"seed={seed}"]
    chosen = recipe_file.load(recipe, changes, load_plugin)
    made_of = {
        "recipe": chosen.model_dump(),
        "text": prepare(chosen.text).identity,
        **plugin_hashes(chosen.model.attention),
    }
    kept = KeptResult(out, f"{name}-{rate:g}-{seed}", made_of)

    def made() -> dict[str, Any]:
        print(f"{name}, learning rate {rate:g}, seed {seed}", file=sys.stderr)
        train(chosen, kept.folder, resume="auto")  # stopped by a signal it raises: half a run is no result
        return ComparedRun(name, rate, seed, *_measured(kept.folder, chosen))._asdict()

    return ComparedRun(**kept.get(made))


def _measured(folder: Path, recipe: Recipe) -> tuple[float, int, float, int, int]:
    """Return the numbers of a finished run; its speed is the median of its log, which no pause distorts."""
    lines = read_entries(folder / "metrics.jsonl")
    validation = last_validation(lines)
    assert validation is not None
    speed = statistics.median(line["tokens_per_second"] for line in lines if "tokens_per_second" in line)
    training, length = recipe.training, recipe.text.sequence_length
    tokens = lines[-1]["step"] * training.batch_size * training.accumulate * length
    model = load(folder).model
    state = state_size(model)
    return (
        validation["bits_per_byte"],
        tokens,
        speed,
        count_parameters(model),
        state.empty.bytes + length * state.per_token.bytes,
    )
