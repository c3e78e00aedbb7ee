"""`lmlong score`: how surprising a text is to a model, line by line, as it comes."""

from pathlib import Path
from typing import Literal

import click

from lmlong.cli import options
from lmlong.errors import UsageError

STDIN = Path("-")


class Input(options.InFile):
    """A file to read, or - for standard input."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        return STDIN if str(value) == str(STDIN) else super().convert(value, param, ctx)


@click.command()
@options.run
@click.argument("files", nargs=-1, type=Input(), metavar="[FILE ...]")
@click.option(
    "--by",
    "unit",
    type=click.Choice(["token", "byte", "line", "record", "position"]),
    default="line",
    show_default=True,
    help="What is told of. A record is a line that is a text of its own; positions are stretches each as long as all "
    "before.",
)
@click.option("--above", type=float, metavar="Z", help="Tell only what is at least so unusual.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["json", "tsv", "text"]),
    default="json",
    show_default=True,
    help="Lines of JSON, a table with tabs, or the text alone.",
)
@click.option(
    "--text",
    "keep",
    default=200,
    show_default=True,
    metavar="N",
    type=click.IntRange(0),
    help="Tell the first so many bytes of each.",
)
@click.option(
    "--field", metavar="NAME", help="--by record: lines are JSON objects, and the text is this field of them."
)
@click.option(
    "--streams",
    metavar="NAME",
    help="--by record: lines are JSON objects, and go on with the text of those with the same value of this field.",
)
@click.option(
    "--streams-memory",
    default="1g",
    show_default=True,
    metavar="BYTES",
    type=options.TokenCount(0),
    help="--streams: states of so many bytes are in memory, others in files below TMPDIR.",
)
@click.option(
    "--most-streams",
    default=100_000,
    show_default=True,
    type=click.IntRange(1),
    help="--streams: the most that are remembered.",
)
@click.option("--follow", is_flag=True, help="Wait for more at the end of FILE, for ever, as tail -F does.")
@click.option(
    "--quiet",
    metavar="SECONDS",
    type=click.FloatRange(0),
    help="Where nothing came for so long, read the last tokens as they are; 0 for never.  [default: 1 with --follow, "
    "otherwise never]",
)
@click.option("--load-state", type=options.SeekableFile(), help="Go on from what --save-state remembered.")
@click.option("--save-state", type=options.NewFile(), help="Remember all that was read in this file.")
@options.plot("surprise along the text")
@options.weights
@options.precision
@options.state_dtype
@options.threads
@options.device
def score(
    run: str,
    files: tuple[Path, ...],
    unit: Literal["token", "byte", "line", "record", "position"],
    above: float | None,
    form: Literal["json", "tsv", "text"],
    keep: int,
    field: str | None,
    streams: str | None,
    streams_memory: int,
    most_streams: int,
    follow: bool,
    quiet: float | None,
    load_state: Path | None,
    save_state: Path | None,
    plot: Path | None,
    weights: Literal["32", "bf16", "int8"],
    precision: Literal["auto", "32", "bf16", "16"],
    state_dtype: Literal["32", "64"],
    device: str,
) -> None:
    """Tell how surprising each line of a text is to the model of RUN, as it comes.

    FILEs are read one after the other, each as a document of its own; without any, standard input is, which need not
    end. For each line, or other unit, its bits are told, how many those are for a byte, the mean of all so far, and z:
    how far it is above the median of the lines before it by bits / (bytes + 16), in robust standard deviations; tokens
    are compared by their bits. What is told is written at once; the memory does not grow with the text.

    A line is told when no further bytes could change its tokens, which may take the first of the next line, or
    --quiet. --save-state leaves what is not certain yet to a call with --load-state, and is written on Ctrl-C and
    SIGTERM too. --load-state reads on in the same FILE where it has grown since, and another one from its beginning.

    \b
    Example: what is strange in a log that goes on, then a picture of a book.
      lmlong score runs/logs --follow app.log --above 8 --format text
      lmlong score runs/book book.txt --plot surprise.png > lines.jsonl
    """
    from lmlong.cli.output import check_files
    from lmlong.cli.scoring import Job, Show, run_job

    inputs = list(dict.fromkeys(files)) or [STDIN]
    if unit != "record" and (field or streams):
        raise UsageError("--field, --streams: are of records. Give --by record too.")
    if (load_state or save_state) and len(inputs) > 1:
        raise UsageError("--load-state, --save-state: of one input. Give one FILE.")
    if follow and (len(inputs) > 1 or inputs == [STDIN]):
        raise UsageError("--follow: waits at the end of one FILE. Name one.")
    check_files(None, plot)
    quiet = (1.0 if follow else None) if quiet is None else quiet or None

    from lmlong.inference.loading import load
    from lmlong.model.precision import evaluation_precision

    trained = load(run, device, weights, state_dtype)
    job = Job(
        trained,
        inputs,
        unit,
        keep,
        quiet,
        follow,
        field,
        streams,
        streams_memory,
        most_streams,
        load_state,
        save_state,
        evaluation_precision(
            None if precision == "auto" else precision, trained.recipe.training.precision, trained.device
        ),
    )
    show = Show(form, above, plot is not None)
    code = run_job(job, show)
    show.finish(plot, run)
    if code:
        raise click.exceptions.Exit(code)
