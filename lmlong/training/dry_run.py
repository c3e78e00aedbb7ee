"""`--dry-run`: the time and memory of a run, from real steps that a child process takes (measured_steps.py)."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lmlong.attention.plugins import LOADED
from lmlong.errors import CheckpointError, LmlongError, RecipeError, UsageError
from lmlong.recipe import Recipe
from lmlong.recipe import file as recipe_file

OUT_OF_TIME, OUT_OF_MEMORY = 96, 97
"""Exit codes of the child. That of a process which the system kills for lack of memory is negative."""

LIMIT = 60.0
"""Maximum seconds of two steps."""

SHORTEST_SEGMENT = 64
"""The segment that is proposed if no row was measured."""


class DryRun(NamedTuple):
    """What a run takes, as far as it was measured."""

    device: str
    parameters: int
    in_tables: int  # of the parameters, those in tables of n-grams
    batches: int  # of a step
    rows: int  # of a batch
    longest: int  # tokens of a row of the longest batch
    memory_bytes: int | None  # of the device; None if the system does not report it
    limit_seconds: float  # of two steps
    length: int = 0  # tokens of a row of the longest batch that was measured; 0 if none was
    step_seconds: float = 0.0
    peak_bytes: int | None = None  # of the process, or of the GPU; None on Windows
    checkpoint_bytes: int = 0
    steps: int = 0  # of the run
    run_seconds: float = 0.0  # in proportion to the tokens, without validation
    too_long: str = ""  # why longer rows were not measured: time or memory
    saves_memory: Sequence[str] = ()  # overrides, if memory does not suffice
    notes: Sequence[str] = ()

    def text(self) -> str:
        """Return a table of 80 columns."""
        longer = f"rows of {self.longest:,} tokens:" if self.length else "even short rows:"
        time = _duration(self.run_seconds) + (
            " if time grows with the tokens" if self.too_long else " without validation"
        )
        batches = f"{self.batches:,} batch{'' if self.batches == 1 else 'es'} of {self.rows:,} x {self.length:,} tokens"
        peak = "unknown" if self.peak_bytes is None else f"{self.peak_bytes / 1e9:.2f} GB at the peak of a step"
        of = "" if self.memory_bytes is None else f", of {self.memory_bytes / 1e9:.2f} GB"
        tables = f", {self.in_tables:,} of them in tables of n-grams" if self.in_tables else ""
        rows = [("device", self.device), ("parameters", f"{self.parameters:,}{tables}")]
        if self.length:
            rows += [
                ("step", f"{self.step_seconds:.3g} s, {batches}"),
                ("memory", peak + of),
                ("run", f"{self.steps:,} steps, about {time}"),
                ("checkpoint", f"{self.checkpoint_bytes / 1e9:.2f} GB"),
            ]
        if self.too_long:
            time = f"two steps would take over {self.limit_seconds:.0f} s"
            why = {"time": time, "memory": "they need more memory than there is"}[self.too_long]
            rows.append(("not measured", f"{longer} {why}"))
        rows += [("saves memory", options) for options in self.saves_memory]
        rows += [("note", note) for note in self.notes]
        if self.too_long and not self.length:
            rows.append(("note", "use a smaller model, or another machine"))
        return "\n".join(f"{name:13} {value}" for name, value in rows)


def dry_run(recipe: Recipe, limit: float = LIMIT) -> DryRun:
    """Measure steps of a run in a child process, which may be killed for lack of memory.

    The longest batch is measured of which two steps take up to `limit` seconds. Longer rows are not.
    """
    child = subprocess.run(
        [sys.executable, "-m", "lmlong.training.measured_steps"],
        input=json.dumps([list(LOADED), recipe.model_dump_json(), limit]),
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    known = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
    if known and "error" in known[-1]:
        raise {2: UsageError, 4: CheckpointError}.get(known[-1]["exit_code"], LmlongError)(known[-1]["error"])
    lacks_memory = child.returncode == OUT_OF_MEMORY or child.returncode < 0
    if lacks_memory and not known:
        options = ", or ".join(memory_options(recipe, 0))
        raise LmlongError(f"--dry-run: out of memory before the first step. Use a smaller model, or {options}.")
    if child.returncode not in (0, OUT_OF_TIME) and not lacks_memory:
        raise LmlongError(f"--dry-run: the process that measures ended with status {child.returncode}, see above.")
    result = DryRun(**known[-1])
    if lacks_memory:
        result = result._replace(too_long="memory", saves_memory=memory_options(recipe, result.length))
    elif child.returncode:
        result = result._replace(too_long="time")
    return result._replace(notes=list(_notes(recipe)))


def _notes(recipe: Recipe) -> Iterator[str]:
    if recipe.processes > 1:
        yield f"one of {recipe.processes} processes was measured, without the others"
    if recipe.training.strategy == "deepspeed":
        yield "measured without deepspeed, which divides what a process holds"


def memory_options(recipe: Recipe, length: int) -> list[str]:
    """Return overrides, each of which saves memory in a run whose rows may have `length` tokens at most."""
    training = recipe.training
    candidates: list[dict[str, Any]] = [
        {"training.segment": max(length, SHORTEST_SEGMENT)},
        {"training.activation_checkpointing": True},
        {"training.batch_size": 1, "training.accumulate": training.accumulate * training.batch_size},
        {"devices": 2 * recipe.devices, "training.sequence_parallel": 2 * training.sequence_parallel},
    ]
    return [
        " ".join(f"{key}={json.dumps(value)}" for key, value in options.items())
        for options in candidates
        if _changes(recipe, options)
    ]


def _changes(recipe: Recipe, options: dict[str, Any]) -> bool:
    """Return whether options change a recipe, and are valid in it."""
    try:
        return recipe_file.load(recipe.model_dump(), options, as_trained=True) != recipe
    except RecipeError:
        return False


def _duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours:,} h {minutes:02d} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"
