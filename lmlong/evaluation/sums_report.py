"""Sums of documents as cells of a table, as values for JSON and as lines of a plot, with their standard errors."""

import math
from collections.abc import Sequence

from lmlong.evaluation.document_sums import Sums
from lmlong.report.figure import Line, Style
from lmlong.report.table import Column

ERROR = Column("±", 8, ".4f")
NATS = (Column("nats/token", 12, ".4f"), ERROR)
BITS = (Column("bits/byte", 11, ".4f"), ERROR)


def nats(sums: Sums) -> tuple[float, float]:
    return sums.totals.nats_per_token, sums.nats_error


def bits(sums: Sums) -> tuple[float, float]:
    return sums.totals.bits_per_byte, sums.bits_error


def perplexity(sums: Sums) -> str:
    value = sums.totals.perplexity
    return f"{value:,.2f}" if value < 1e8 else f"{value:.2e}"


def sum_values(sums: Sums) -> dict[str, float]:
    totals = sums.totals
    return {
        "nats": totals.nats,
        "tokens": totals.tokens,
        "bytes": totals.bytes,
        "documents": sums.documents,
        **({} if sums.cluster is None else {"clusters": sums.clusters}),
        "nats_per_token": totals.nats_per_token,
        "nats_error": sums.nats_error,
        "perplexity": totals.perplexity,
        "bits_per_byte": totals.bits_per_byte,
        "bits_error": sums.bits_error,
    }


def change_values(sums: Sums, other: Sums | None) -> dict[str, float]:
    """Return by how many nats per token these sums exceed others of the same targets."""
    change, error = sums.above(other) if other else (math.nan, math.nan)
    return {"change": change, "change_error": error}


def line(name: str, points: Sequence[tuple[int, Sums]], style: Style, errors: Sequence[float] | None = None) -> Line:
    """Describe bits per byte at some lengths, with a band of two of the errors, by default their own."""
    bits = [sums.totals.bits_per_byte for _, sums in points]
    errors = errors or [sums.bits_error for _, sums in points]
    low, high = ([bit + 2 * sign * error for bit, error in zip(bits, errors, strict=True)] for sign in (-1, 1))
    return Line(name, [length for length, _ in points], bits, style, low, high)
