"""`lmlong report`: one HTML page about runs."""

from pathlib import Path

import click

from lmlong.cli import options
from lmlong.cli.output import STDOUT, report_left_out
from lmlong.io.system_errors import explain_errors


@click.command()
@options.runs
@click.option(
    *("-o", "--out"),
    type=options.NewFile(".html", ".htm", writable=True, allow_dash=True),
    default="report.html",
    help="File to write, or - for standard output.",
)
@options.data
@click.option(
    "--tokens",
    type=options.TokenCount(2),
    metavar="N",
    default="32k",
    help="Measure on the first N tokens of the text.",
)
@click.option(
    "--measure/--no-measure", default=True, help="Measure prediction, recall and speed, or only report the training."
)
@options.device
@options.plugin
def report(runs: tuple[str, ...], out: Path, data: tuple[str, ...], tokens: int, measure: bool, device: str) -> None:
    """Write one HTML page about each RUN, or several side by side, to send to others.

    It contains the text and the tokenizer, curves of training, samples, bits per byte by context and position, recall,
    the health of the state, speed, the recipe, the environment, and commands to reproduce them. The page needs no
    network and no script, and can be printed. The measurements are those of `lmlong eval`, on the
    held-out text of the run unless --data names another.

    \b
    Example: a run, then two side by side.
      lmlong report runs/quickstart
      lmlong report linear softmax -o linear-softmax.html
    """
    from lmlong.evaluation.run_page import run_page
    from lmlong.evaluation.run_report import report_runs

    report_left_out(data)
    page = run_page(report_runs(runs, data, measure=measure, tokens=tokens, device=device))
    with explain_errors(out), click.open_file(str(out), "w", encoding="utf-8") as file:
        file.write(page)
    if out != STDOUT:
        click.echo(f"{out}: {len(page.encode()) / 1000:,.0f} kB")
