"""Curves of perplexity against length, as a table for people and as plain values for programs."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from lmlong.evaluation.lengths import name_length
from lmlong.evaluation.perplexity import AtLength, Curve
from lmlong.inference.state_size import StateSize

HEAD = f"{'length':>9}{'nats/token':>13}{'perplexity':>13}{'bits/byte':>12}{'tokens':>15}{'seconds':>10}"


def table(curves: Sequence[Curve]) -> str:
    """The curves under one another, at most 80 columns wide but for the names."""
    marked = any(point.length == curve.trained_length for curve in curves for point in curve.points)
    note = ["", "* the length it was trained at"] if marked else []
    return "\n".join(["\n\n".join(map(_section, curves)), *note])


def plain(curves: Iterable[Curve]) -> dict[str, Any]:
    """The curves as what JSON can hold: sums and counts, and the ratios made of them; null where there is no number."""
    return {"runs": [_plain_curve(curve) for curve in curves]}


def describe_state(state: StateSize) -> str:
    """The size of a state in words."""
    growth = f" and {state.per_token.numbers:,} more a token" if state.per_token.numbers else ""
    return f"state of {state.empty.numbers:,} numbers{growth}"


def _section(curve: Curve) -> str:
    facts = f"{curve.parameters:,} parameters, {describe_state(curve.state)}"
    rows = [_row(point, "*" if point.length == curve.trained_length else "") for point in curve.points]
    return "\n".join([curve.name, f"  {facts}", HEAD, *rows])


def _row(point: AtLength, mark: str) -> str:
    totals = point.totals
    perplexity = totals.perplexity
    shown = f"{perplexity:,.2f}" if perplexity < 1e8 else f"{perplexity:.2e}"
    return (
        f"{name_length(point.length):>8}{mark:1}{totals.nats_per_token:>13.4f}{shown:>13}"
        f"{totals.bits_per_byte:>12.4f}{totals.tokens:>15,}{point.seconds:>10.1f}"
    )


def _plain_curve(curve: Curve) -> dict[str, Any]:
    return {
        "run": curve.name,
        "checkpoint": curve.checkpoint,
        "parameters": curve.parameters,
        "trained_length": curve.trained_length,
        "state_numbers": curve.state.empty.numbers,
        "state_numbers_per_token": curve.state.per_token.numbers,
        "lengths": [_plain_point(point) for point in curve.points],
        "left_out": curve.left_out,
    }


def _plain_point(point: AtLength) -> dict[str, Any]:
    totals = point.totals
    values = {
        "length": point.length,
        "nats": totals.nats,
        "tokens": totals.tokens,
        "bytes": totals.bytes,
        "nats_per_token": totals.nats_per_token,
        "perplexity": totals.perplexity,
        "bits_per_byte": totals.bits_per_byte,
        "seconds": point.seconds,
    }
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
