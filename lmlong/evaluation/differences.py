"""How two runs differ in bits per byte on the same text, with the paired error: that of the differences of each
document, smaller by far than that of either run."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lmlong.evaluation.document_sums import Sums
from lmlong.evaluation.results import PerplexityReport
from lmlong.recipe.lengths import name_length
from lmlong.report.table import Column, format_table, plural


class Difference(NamedTuple):
    """Two runs on the same targets."""

    length: int | None  # tokens read before each target; None for whole documents, the state carried
    sums: Sums
    base: Sums

    @property
    def difference(self) -> float:
        """Bits per byte of the run above those of the base."""
        return self.sums.bits_above(self.base)[0]

    @property
    def error(self) -> float:
        """Standard error of the difference, paired by documents."""
        return self.sums.bits_above(self.base)[1]


class Differences(NamedTuple):
    """A run against the first one."""

    run: PerplexityReport
    base: PerplexityReport
    rows: list[Difference]


def of(reports: Sequence[PerplexityReport]) -> list[Differences]:
    """Return the differences of each further run from the first, where both have the same targets."""
    return [Differences(report, reports[0], list(_rows(report, reports[0]))) for report in reports[1:]]


def _rows(report: PerplexityReport, base: PerplexityReport) -> Iterator[Difference]:
    if report.text != base.text:
        return
    known = {point.length: point.sums for point in base.context}
    pairs = [(point.length, point.sums, known[point.length]) for point in report.context if point.length in known]
    for length, sums, other in [*pairs, (None, report.carried, base.carried)]:
        if sums and other and sums.has_targets_of(other):
            yield Difference(length, sums, other)


def lines(found: Differences) -> list[str]:
    """Return the differences as a table."""
    run, base, rows = found
    if not rows:
        same = run.text == base.text
        why = "no targets in common. Give --lengths" if same else "measured on another text. Name one by --data"
        return [f"{run.name} minus {base.name}: {why}."]
    of_what = plural(rows[0].sums.documents, "document" if run.parts_of is None else "part")
    columns = [
        Column("length", 9),
        Column("difference", 13, "+.4f"),
        Column("±", 9, ".4f"),
        *(Column(report.name, max(14, len(report.name) + 2), ".4f") for report in (run, base)),
    ]
    numbers = [
        (
            *("whole" if row.length is None else name_length(row.length), row.difference, row.error),
            *(sums.totals.bits_per_byte for sums in (row.sums, row.base)),
        )
        for row in rows
    ]
    return [
        f"{run.name} minus {base.name}, in bits/byte on the same bytes of {of_what}:",
        "below 0 the first is better; errors are of the differences, paired",
        *format_table(columns, numbers),
    ]


def values(reports: Sequence[PerplexityReport]) -> list[dict[str, Any]]:
    """Return the differences as plain values."""
    return [
        {
            "run": found.run.name,
            "base": found.base.name,
            "rows": [
                {
                    "length": row.length,
                    "difference": row.difference,
                    "error": row.error,
                    "documents": row.sums.documents,
                }
                for row in found.rows
            ],
        }
        for found in of(reports)
    ]
