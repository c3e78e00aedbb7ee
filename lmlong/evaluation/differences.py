"""How two runs differ in bits per byte on the same text, with the paired error: that of the differences of each
document, smaller by far than that of either run."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lmlong.evaluation.document_sums import Estimate, Sums
from lmlong.evaluation.results import PerplexityReport
from lmlong.recipe.lengths import name_length
from lmlong.report.json_values import json_keys
from lmlong.report.table import Column, format_table, plural, with_error


@json_keys("length", "difference=bits.value", "error=bits.error", "documents=sums.documents")
class Difference(NamedTuple):
    """Two runs on the same targets."""

    length: int | None  # tokens read before each target; None for whole documents, the state carried
    sums: Sums
    base: Sums

    @property
    def bits(self) -> Estimate:
        """Bits per byte of the run above those of the base; the error is paired by documents."""
        return self.sums.bits_above(self.base)


@json_keys("run=run.name", "base=base.name", "rows")
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
    of_base = {point.length: point.sums for point in base.context}
    pairs = [(point.length, point.sums, of_base[point.length]) for point in report.context if point.length in of_base]
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
    columns = [
        Column("length", 9, value=lambda row: "whole" if row.length is None else name_length(row.length)),
        *with_error(Column("difference", 13, "+.4f", value="bits"), 9),
        Column(run.name, max(14, len(run.name) + 2), ".4f", value="sums.totals.bits_per_byte"),
        Column(base.name, max(14, len(base.name) + 2), ".4f", value="base.totals.bits_per_byte"),
    ]
    documents = plural(rows[0].sums.documents, run.unit)
    return [
        f"{run.name} minus {base.name}, in bits/byte on the same bytes of {documents}:",
        "below 0 the first is better; errors are of the differences, paired",
        *format_table(columns, rows),
    ]
