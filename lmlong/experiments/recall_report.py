"""The recall experiment as a table; its JSON form is that of the kept results."""

from collections.abc import Sequence

from lmlong.experiments.recall import RecallResult
from lmlong.report.table import Column, format_table


def table(best: Sequence[RecallResult]) -> str:
    """Return the share of queries answered by candidate and width, for an 80-column terminal."""
    numbers = list(best[0].scores)
    columns = [
        Column("attention", 18, align="<"),
        Column("width", 5),
        Column("state", 11),
        Column("rate", 8, "g"),
        *(Column(str(pairs), 6, ".3f") for pairs in numbers),
    ]
    rows = [
        [
            result.candidate,
            result.width,
            f"{result.state_bytes / 1024:.1f} KiB",
            result.rate,
            *(result.scores[pairs].accuracy for pairs in numbers),
        ]
        for result in best
    ]
    return "\n".join([f"{'':<42}share of queries answered, by pairs", *format_table(columns, rows)])
