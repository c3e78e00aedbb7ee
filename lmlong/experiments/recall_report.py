"""The recall experiment as a table and a plot; its JSON form is that of the kept results."""

from collections.abc import Sequence

from lmlong.experiments.recall import RecallResult
from lmlong.report.figure import Figure, Line, Panel, style
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


def figure(best: Sequence[RecallResult]) -> Figure:
    """Describe the share answered against the number of pairs: a panel for each width, a line for each candidate."""
    names = list(dict.fromkeys(result.candidate for result in best))
    panels = []
    for width in sorted({result.width for result in best}):
        lines = []
        for result in (result for result in best if result.width == width):
            shares = [score.accuracy for score in result.scores.values()]
            lines.append(Line(result.candidate, list(result.scores), shares, style(names.index(result.candidate))))
        panels.append(
            Panel(
                lines,
                title=f"width {width}",
                x_label="pairs",
                y_label="share of queries answered",
                ticks=list(best[0].scores),
                y_range=(0, 1.03),
            )
        )
    size = (1.5 + 3.6 * len(panels), 4.6)
    return Figure([panels], size=size, share_y=True, legend_columns=min(len(names), 2 + len(panels)))
