#!/usr/bin/env python
"""What fits on 1 to 64 GPUs, and what a training step sends between them, by calculation.

    tools/scaling.py            print the tables of docs/reference/scaling.md
    tools/scaling.py --write    write them into the page

Takes about three minutes. Nothing is measured: see lmlong/training/step_bytes.py.
"""

import argparse
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from lmlong.recipe import Recipe
from lmlong.recipe.lengths import name_length
from lmlong.report.table import Column, format_table
from lmlong.training.step_bytes import (
    ROW_BYTES,
    LastProcess,
    StepBytes,
    activation_bytes,
    count_state,
    gathered_bytes,
    pass_through,
)

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "scaling.md"

MODELS = {"118M": {}, "1.3B": {"model.width": 2048, "model.layers": 22, "model.heads": 32}}
"""Options that replace those of the recipe `medium`."""

LENGTHS, GPUS = (2**17, 2**20, 10 * 2**20), (1, 2, 4, 8, 16, 32, 64)

USABLE = 72e9
"""Bytes of a GPU of 80 GB for tensors: the rest is fragments, the CUDA context and compiled kernels."""

STAGES = ("ddp", "2", "3")
"""From the least to the most divided; stage 1 holds as much as stage 2."""

KINDS: dict[str, dict[str, Any]] = {
    "linear": {},
    "linear by channel": {"decay": "channel"},
    "delta": {"kind": "delta"},
    "window of 512": {"kind": "window", "window": 512},
    "linear, parallel window of 512": {"parallel_window": 512},
    "n-grams": {"kind": "ngram"},
    "softmax": {"kind": "softmax"},
}


class Setup(NamedTuple):
    """How a number of GPUs train, and what each of them holds."""

    gpus: int
    parts: int
    stage: str
    tensors: StepBytes


def recipe_of(model: str, **training: Any) -> Recipe:
    options = {f"training.{name}": value for name, value in {"batch_size": 1, "precision": "bf16", **training}.items()}
    return Recipe.load("medium", {**MODELS[model], **options})


@cache
def activations(model: str, recompute: bool, tokens: int) -> int:
    recipe = recipe_of(model, activation_checkpointing=recompute)
    return activation_bytes(recipe, recipe.text.tokenizer.most_tokens, tokens)


@cache
def effects(model: str, recompute: bool, parts: int) -> int:
    return gathered_bytes(recipe_of(model, activation_checkpointing=recompute), LENGTHS[-1], parts)


@cache
def state(model: str, gpus: int, stage: str) -> StepBytes:
    strategy = {} if stage == "ddp" else {"strategy": "deepspeed", "deepspeed.stage": int(stage)}
    recipe = recipe_of(model, **strategy).model_copy(update={"devices": gpus})
    return count_state(recipe, recipe.text.tokenizer.most_tokens)


def setup(model: str, length: int, recompute: bool, gpus: int) -> Setup | None:
    """Return how GPUs hold a step with the fewest parts of a row, then the least divided state; None if they cannot."""
    for parts in (count for count in GPUS if count <= gpus):
        own = length // parts
        held = activations(model, recompute, own) + ROW_BYTES * (length - own)
        for stage in STAGES if gpus > 1 else STAGES[:1]:
            tensors = state(model, gpus, stage)._replace(activations=held, effects=effects(model, recompute, parts))
            if tensors.total <= USABLE:
                return Setup(gpus, parts, "-" if gpus == 1 else stage, tensors)
    return None


def memory_tables() -> Iterator[tuple[str, list[str]]]:
    """Yield the table of what fits, and that of what each GPU holds where the fewest GPUs suffice."""
    first = [Column("model", 6, align="<"), Column("tokens", 6), Column("checkpointing", 14)]
    found, fewest = [], []
    for model, length, recompute in ((m, n, c) for m in MODELS for n in LENGTHS for c in (False, True)):
        setups = [setup(model, length, recompute, gpus) for gpus in GPUS]
        names = [model, name_length(length), "yes" if recompute else "no"]
        found.append(names + ["" if one is None else f"{one.parts} {one.stage}" for one in setups])
        if least := next(filter(None, setups), None):
            gigabytes = [size / 1e9 for size in (*least.tensors, least.tensors.total)]
            fewest.append([*names, least.gpus, least.parts, least.stage, *gigabytes])
    yield "fits", format_table([*first, *(Column(str(gpus), 8) for gpus in GPUS)], found)
    columns = [Column("GPUs", 6), Column("P", 4), Column("stage", 7)]
    columns += [Column(name, len(name) + 2, ".2f") for name in (*StepBytes._fields, "total")]
    yield "parts", format_table([*first, *columns], fewest)


def sent_table(kinds: tuple[str, ...] = tuple(KINDS), **model: Any) -> list[str]:
    """Return the table of what a process sends to each other process of its group, by layer and step."""
    rows = []
    for kind in kinds:
        options = {"layers": 1, **model, **{f"attention.{name}": value for name, value in KINDS[kind].items()}}
        recipe = Recipe.load("medium", {f"model.{name}": value for name, value in options.items()})
        recipe = recipe.model_copy(update={"training": recipe_of("118M", activation_checkpointing=False).training})
        cells: list[Any] = [kind]
        for length in (2**12, 2**16):
            group = LastProcess(2)
            pass_through(recipe, 1, length, group)
            cells += [group.sent_forward / 1e3, (group.bytes_sent - group.sent_forward) / 1e3]
        rows.append(cells)
    columns = [Column("kB by layer and step", 31, align="<")]
    columns += [Column(f"{way} {size}", 14, ",.1f") for size in ("4k", "64k") for way in ("forward", "backward")]
    return format_table(columns, rows)


def tables() -> Iterator[tuple[str, list[str]]]:
    """Yield the tables by their names in the page."""
    yield "sent", sent_table()
    yield from memory_tables()


def mark(name: str) -> str:
    """Return what a table begins with in the page."""
    return f"<!-- {name} -->\n```text\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables into the page")
    options = parser.parse_args()
    for name, lines in tables():
        print("\n".join(lines), flush=True)
        if options.write:
            before, rest = PAGE.read_text(encoding="utf-8").split(mark(name))
            PAGE.write_text("".join([before, mark(name), *(f"{line}\n" for line in lines), rest[rest.index("```") :]]))


if __name__ == "__main__":
    main()
