"""lmlong check: the laws of causal attention, held against a trained model."""

import click

from lmlong.cli import options
from lmlong.cli.output import STDOUT, show


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--tokens", default=512, show_default=True, type=click.IntRange(min=8), help="Length of the text.")
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@options.device
def check(run: str, tokens: int, as_json: bool, device: str) -> None:
    """Hold the laws of causal attention against the model of RUN, in the number format it was trained in.

    On a text that the model writes itself: reading token by token, at once and in parts must give the same; the future
    must not change the past; rows and packed documents must not see each other; the state must be as large as
    declared; denominators must stay away from 0. Exit code 1 if a law is broken.

    \b
    Example: after training, before trusting the numbers.
      lmlong check runs/quickstart
    """
    from lmlong.evaluation.law_check import check as check_laws
    from lmlong.evaluation.law_check_report import table, to_json
    from lmlong.inference.loading import load
    from lmlong.inference.sampled_text import sampled_text

    loaded = load(run, device)
    report = check_laws(loaded, *sampled_text(loaded, rows=3, tokens=tokens))
    show(table(report), to_json(report), STDOUT if as_json else None, None)
    if not report.kept:
        raise SystemExit(1)
