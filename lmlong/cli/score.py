"""lmlong score: the surprisal of each line of a text, as it arrives."""

from pathlib import Path
from typing import Any, Literal

import click

from lmlong.cli import options
from lmlong.errors import UsageError

STDIN = Path("-")


class InputFile(options.TextFile):
    """A file to read, or - for standard input."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        return STDIN if str(value) == str(STDIN) else super().convert(value, param, ctx)


@click.command()
@options.run
@click.argument("file", default=STDIN, type=InputFile())
@click.option(
    "--by",
    "unit",
    type=click.Choice(["token", "byte", "line", "record", "position"]),
    default="line",
    help="The unit that is scored. A record is a line that is a document of its own; positions are stretches, each as "
    "long as all text before it.",
)
@click.option("--above", type=float, metavar="Z", help="Print only units whose z is at least Z.")
@click.option(
    "--top",
    type=click.IntRange(1),
    metavar="N",
    help="Print only the N units with the highest z, highest first, at the end.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["json", "tsv", "text"]),
    default="json",
    help="Lines of JSON, a table with tabs, or the text alone.",
)
@click.option(
    "--text", "keep", default=200, metavar="N", type=click.IntRange(0), help="Print the first N bytes of each unit."
)
@click.option("--field", metavar="NAME", help="--by record: lines are JSON objects; score the text in this field.")
@click.option("--follow", is_flag=True, help="Wait for more data at the end of FILE, indefinitely, as tail -F does.")
@click.option(
    "--quiet",
    metavar="SECONDS",
    type=click.FloatRange(0),
    help="When no data arrives for SECONDS, score the last tokens as they are; 0 for never.  [default: 1 with "
    "--follow, otherwise never]",
)
@options.load_state
@options.save_state
@options.plot("surprisal along the text")
@options.state_dtype
@options.threads
@options.loading
def score(
    run: str,
    file: Path,
    form: Literal["json", "tsv", "text"],
    above: float | None,
    top: int | None,
    plot: Path | None,
    device: str,
    weights: Any,
    state_dtype: Any,
    learn: bool | None,
    **given: Any,
) -> None:
    """Print the surprisal of each line of a text under the model of RUN, as it arrives.

    Without FILE, standard input is read, which may be endless. For each line, or other unit, print its bits, bits per
    byte, the mean of all units so far, and z: how far it is above the median of the units before it by
    bits / (bytes + 16), in robust standard deviations; tokens are compared by their bits. Each result is written at
    once, except with --top; memory does not grow with the text.

    A line is scored when no further bytes can change its tokens, which may take the first token of the next line, or
    --quiet. --save-state keeps what is undecided for a run with --load-state; it is written on Ctrl-C and SIGTERM too.
    --load-state continues in the same FILE if it has grown since, and reads another file from its beginning.

    \b
    Example: unusual lines of a growing log, then the ten most unusual of a book, then its plot.
      lmlong score runs/logs --follow app.log --above 8 --format text
      lmlong score runs/book book.txt --top 10 --format tsv
      lmlong score runs/book book.txt --plot surprise.png > lines.jsonl
    """
    from lmlong.cli.scoring import Job, Show, run_job
    from lmlong.inference.loading import load

    if given["unit"] != "record" and given["field"]:
        raise UsageError("--field: applies to records. Give --by record too.")
    if given["follow"] and file == STDIN:
        raise UsageError("--follow: waits at the end of a FILE. Name one.")
    if given["quiet"] is None and given["follow"]:
        given["quiet"] = 1.0

    trained = load(run, device, weights, state_dtype, learn)
    chosen = trained.set_up_evaluation(None)
    show = Show(form, above, top, plot is not None)
    code = run_job(Job(trained, file, chosen, **{**given, "quiet": given["quiet"] or None}), show)
    show.finish(plot, run, given["unit"])
    if code:
        raise click.exceptions.Exit(code)
