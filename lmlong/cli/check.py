"""`lmlong check`: check the causal-attention invariants of a trained model or a plug-in."""

from pathlib import Path
from typing import Any

import click

from lmlong.cli import options
from lmlong.cli.output import show
from lmlong.errors import UsageError
from lmlong.report.progress import waiting

TOKENS = 512
"""Length of the text that is checked."""


@click.command()
@options.any_run
@options.json_file
@options.weights
@options.device
@options.plugin
def check(run: str | None, json_file: Path | None, weights: Any, device: str) -> None:
    """Check the causal-attention invariants on the model of RUN, in the number format that it was trained in.

    On a text that the model generates: decoding token by token, a single forward pass and reading in parts must give
    the same result; later tokens must not affect earlier ones; rows and packed documents must not affect each other;
    the state must have its declared size; denominators must not approach 0. Exit code 1 if an invariant is violated.

    Results are compared in float64. Apple GPUs do not support it, so the CPU is used on a Mac. With --weights, the
    float64 results have the same quantized weights, so that the rounding of activations is what is tolerated.

    With --plugin and without RUN, check each attention and feature map of the plug-in on random inputs.

    \b
    Example: a trained model, and a custom attention before training.
      lmlong check runs/quickstart
      lmlong check --plugin two_gates.py
    """
    if run is None:
        _check_plugins(json_file)
        return
    from lmlong.evaluation.law_check import check as check_laws
    from lmlong.evaluation.law_check import law_report
    from lmlong.inference.loading import load
    from lmlong.inference.samples import sampled_text
    from lmlong.model.device import float64_device, pick_device

    loaded = load(run, float64_device(pick_device(device)).type, weights, state_dtype="32", learn=False)
    text = sampled_text(loaded, rows=3, tokens=TOKENS)
    with waiting("checking the invariants"):
        report = check_laws(loaded, *text)
    show(law_report(report), json_file)
    if not report.kept:
        raise SystemExit(1)


def _check_plugins(json_file: Path | None) -> None:
    from lmlong.attention.plugins import LOADED
    from lmlong.evaluation.law_check import plugin_report
    from lmlong.testing import examine_plugin

    if not LOADED:
        raise UsageError("check: RUN and --plugin are missing. Name a run, or a plug-in with --plugin FILE.")
    with waiting("checking the plug-in"):
        reports = [report for plugin in LOADED.values() for report in examine_plugin(plugin)]
    show(plugin_report(reports), json_file)
    if not all(report.kept for report in reports):
        raise SystemExit(1)
