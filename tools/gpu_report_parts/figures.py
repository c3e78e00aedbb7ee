"""The figures measured so far, in a file that survives the processes that write it, and the page that shows them.

Only Python's own library is used here: the packages that lmlong needs may not be installed yet.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

TITLES = {
    "laws": "Errors of the kernels against the definition in float64, and of the laws, relative to the norm",
    "training": "A training step of the recipe `medium` on one row of random tokens, in bf16",
    "attention": "Attention alone, forward and backward pass, tokens/s in bf16 by the number of tokens",
    "decoding": "Decoding one text by the recipe `medium`, weights in bf16",
    "losses": "200 steps of `lmlong train` in float32, on a GPU and on a CPU",
}

WARNING = "**Nothing here was measured on a GPU.** Tiny sizes ran on a CPU; the times say nothing about any speed."


LATE = 3
"""Exit code of a process that had no time for all of its part."""


class Measurement(NamedTuple):
    """One measurement: some cells of a row of its part's table."""

    part: str
    row: str
    column: str = ""
    cells: dict[str, Any] | None = None
    failure: str | None = None
    left_out: str | None = None  # why it was not measured, which is no failure
    share: int = 0  # the process that measures it

    @property
    def open(self) -> bool:
        return self.cells is None and self.failure is None and self.left_out is None


class Figures:
    """A file of measurements, a line for each as it begins and as it ends; the last line counts."""

    def __init__(self, file: Path):
        self.file = file

    def read(self) -> list[Measurement]:
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        measurements = [Measurement(**json.loads(line)) for line in lines if line.endswith("}")]
        return list({(one.part, one.row, one.column): one for one in measurements}.values())

    def add(self, part: str, row: str, column: str = "", **result: Any) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(Measurement(part, row, column, **result)._asdict()) + "\n")

    def fail_open(self, part: str, share: int, why: str) -> bool:
        """Record that the measurement that a process had begun failed; return False if it had begun none."""
        begun = [one for one in self.read() if (one.part, one.share) == (part, share) and one.open]
        for one in begun:
            self.add(*one[:3], failure=why, share=share)
        return bool(begun)


def page(measurements: list[Measurement], about: dict[str, Any], tiny: bool) -> str:
    """Return a page in Markdown: a table for each part, then what failed and what was left out."""
    lines = ["# lmlong on a GPU", "", *([WARNING, ""] if tiny else []), *(f"- {k}: {v}" for k, v in about.items())]
    for part, title in TITLES.items():
        of_part = [one for one in measurements if one.part == part]
        lines += ["", f"## {part.capitalize()}", "", f"{title}.", "", *table(of_part)]
        for heading, field in {"Failed": "failure", "Left out": "left_out"}.items():
            said = [f"- {one.row} {one.column}: {getattr(one, field)}" for one in of_part if getattr(one, field)]
            lines += ["", f"{heading}:", "", *said] if said else []
        left = [f"{one.row} {one.column}".strip() for one in of_part if one.open]
        lines += ["", f"Not finished: {', '.join(left)}."] if left else []
    return "\n".join(lines) + "\n"


def table(measurements: list[Measurement]) -> list[str]:
    """Return the cells of all measurements, joined by their rows."""
    rows: dict[str, dict[str, Any]] = {}
    for one in measurements:
        if one.cells:
            rows.setdefault(one.row, {}).update(one.cells)
    if not rows:
        return ["Nothing was measured."]
    columns = list(dict.fromkeys(name for cells in rows.values() for name in cells))
    lines = [["", *columns], ["---"] * (1 + len(columns))]
    lines += [[row, *(number(cells.get(name)) for name in columns)] for row, cells in rows.items()]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def number(value: Any) -> str:
    if not isinstance(value, float):
        return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
