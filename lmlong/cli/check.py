"""lmlong check: the laws of causal attention, checked on a trained model or a plug-in."""

import click

from lmlong.cli import options
from lmlong.cli.output import STDOUT, show
from lmlong.errors import UsageError


@click.command()
@options.any_run
@click.option(
    "--tokens", default=512, show_default=True, metavar="N", type=options.Length(8), help="Length of the text."
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@options.threads
@options.device
def check(run: str | None, tokens: int, as_json: bool, device: str) -> None:
    """Check the laws of causal attention on the model of RUN, in the number format it was trained in.

    The model generates a text, and then: reading it token by token, at once and in parts must give the same; the
    future must not change the past; rows and packed documents must be independent; the state must have the declared
    size; denominators must stay away from 0. The exit code is 1 if a law is broken.

    On a Mac this runs on the CPU, because its GPU has no float64, in which the laws are compared.

    With --plugin and no RUN, check each attention and feature map of the plug-in on random inputs.

    \b
    Example: a trained model; and an attention of your own, before training.
      lmlong check runs/quickstart
      lmlong check --plugin two_gates.py
    """
    if run is None:
        _check_plugins(as_json)
        return
    from lmlong.evaluation.law_check import check as check_laws
    from lmlong.evaluation.law_check import table
    from lmlong.inference.loading import load
    from lmlong.inference.sampled_text import sampled_text
    from lmlong.model.device import float64_device, pick_device

    # the laws are compared in float64
    loaded = load(run, float64_device(pick_device(device)).type)
    report = check_laws(loaded, *sampled_text(loaded, rows=3, tokens=tokens))
    show(table(report), report, STDOUT if as_json else None, None)
    if not report.kept:
        raise SystemExit(1)


def _check_plugins(as_json: bool) -> None:
    from lmlong.attention.plugins import LOADED
    from lmlong.evaluation.law_check import table_of_plugins
    from lmlong.testing import examine_plugin

    if not LOADED:
        raise UsageError("check: neither a RUN nor a plug-in. Name a run, or a plug-in with --plugin FILE.")
    reports = [report for plugin in LOADED.values() for report in examine_plugin(plugin)]
    show(table_of_plugins(reports), reports, STDOUT if as_json else None, None)
    if not all(report.kept for report in reports):
        raise SystemExit(1)
