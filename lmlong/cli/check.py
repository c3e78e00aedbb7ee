"""lmlong check: the laws of causal attention, held against a trained model."""

import json
from typing import TYPE_CHECKING

import click

from lmlong.cli import options

if TYPE_CHECKING:
    from lmlong.evaluation.check import Report
    from lmlong.evaluation.health import Denominators


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
    from lmlong.evaluation.check import check as hold
    from lmlong.inference.loading import load
    from lmlong.inference.sampled_text import sampled_text

    loaded = load(run, device)
    report = hold(loaded, *sampled_text(loaded, rows=3, tokens=tokens))
    click.echo(_plain(report) if as_json else _table(report))
    if not report.kept:
        raise SystemExit(1)


def _table(report: "Report") -> str:
    """For an 80-column terminal: the laws, then the denominators by position."""
    lines = [f"{'law':<52}{'error':>9}{'allowed':>10}"]
    for verdict in report.verdicts:
        mark = "  kept" if verdict.kept else "  BROKEN"
        lines.append(f"{verdict.law:<52}{verdict.measured:>9.1e}{verdict.allowed:>10.1e}{mark}")
    if report.denominators:
        lines += ["", f"{'denominators at position':<28}{'smallest':>14}{'median':>14}{'largest':>14}"]
        lines += [
            f"{_between(bucket):<28}{bucket.smallest:>14.3g}{bucket.median:>14.3g}{bucket.largest:>14.3g}"
            for bucket in report.denominators
        ]
    broken = sum(not verdict.kept for verdict in report.verdicts)
    text = f"{report.rows} rows of {report.tokens:,} tokens, computed in {report.precision}"
    lines += ["", f"{broken} of {len(report.verdicts)} laws broken" if broken else "all laws kept", text]
    return "\n".join(lines)


def _between(bucket: "Denominators") -> str:
    return f"{bucket.first:,}" if bucket.first == bucket.last else f"{bucket.first:,} to {bucket.last:,}"


def _plain(report: "Report") -> str:
    return json.dumps(
        {
            "kept": report.kept,
            "precision": report.precision,
            "rows": report.rows,
            "tokens": report.tokens,
            "laws": [{**verdict._asdict(), "kept": verdict.kept} for verdict in report.verdicts],
            "denominators": [bucket._asdict() for bucket in report.denominators],
        },
        indent=2,
    )
