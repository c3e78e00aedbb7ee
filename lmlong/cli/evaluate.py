"""lmlong eval: perplexity against length."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lmlong.errors import UsageError

if TYPE_CHECKING:
    from lmlong.evaluation.perplexity import Curve


STDOUT = Path("-")
Result = click.Path(dir_okay=False, writable=True, allow_dash=True, path_type=Path)


@click.command("eval")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option("--data", multiple=True, metavar="FILE", help="Measure on this file, folder or glob; may be repeated.")
@click.option(
    "--lengths", metavar="N,...", help="Window lengths; k is 1,024.  [default: 256,1k,4k,16k and the trained]"
)
@click.option("--tokens", type=click.IntRange(min=2), help="Read only so many tokens of the text.")
@click.option("--json", "json_file", type=Result, help="Write the results as JSON; - for standard output, alone.")
@click.option("--plot", type=Result, help="Draw bits per byte against length: .png, .pdf or .svg.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
def eval_(
    runs: tuple[str, ...],
    data: tuple[str, ...],
    lengths: str | None,
    tokens: int | None,
    json_file: Path | None,
    plot: Path | None,
    device: str,
) -> None:
    """Measure how well each RUN predicts text, against how far back it may look.

    For each length the text is cut into windows of so many tokens, each read from an empty state. Every token but the
    first is a target at every length, so all lengths are compared on the same tokens. The text is what the run held
    out of its training, unless --data names another. Compare runs with different tokenizers by bits per byte.

    \b
    Example: one run on its own held-out text, then two on the same books.
      lmlong eval runs/quickstart --lengths 256,1k,4k --tokens 100000
      lmlong eval linear softmax --data 'books/*.txt' --plot length.png
    """
    from lmlong.charts import check_format
    from lmlong.evaluation.lengths import parse_lengths
    from lmlong.evaluation.perplexity import measure, validation_text
    from lmlong.evaluation.plots import draw
    from lmlong.evaluation.tables import plain, table
    from lmlong.inference.loading import load

    wanted = parse_lengths(lengths) if lengths is not None else None
    for file in (json_file, plot):
        _check_folder(file)
    if plot:
        check_format(plot)

    curves = []
    for run in runs:
        loaded = load(run, device)
        curves.append(measure(_name(run), loaded, validation_text(loaded, data, tokens), wanted))
        _note(curves[-1])

    if plot:
        draw(curves, plot)
    if json_file != STDOUT:
        click.echo(table(curves))
    if json_file:
        with click.open_file(str(json_file), "w", encoding="utf-8") as out:
            out.write(json.dumps(plain(curves), indent=2, allow_nan=False) + "\n")


def _name(run: str) -> str:
    """What a run is called in tables and plots: its path without what all have in common."""
    return run.rstrip("/").removeprefix("runs/")


def _check_folder(file: Path | None) -> None:
    """Refuse a place where no file can be written, before hours are spent on what it should hold."""
    if file and not os.access(file.parent, os.W_OK):
        raise UsageError(f"{file}: its folder is missing or cannot be written to. Create it, or name another file.")


def _note(curve: "Curve") -> None:
    """Tell on stderr what was not measured."""
    from lmlong.evaluation.lengths import name_length

    if curve.left_out:
        names = ", ".join(map(name_length, curve.left_out))
        click.echo(f"{curve.name}: the text is shorter than {names}: left out", err=True)
