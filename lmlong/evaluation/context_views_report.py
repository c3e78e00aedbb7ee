"""Recurrence, remembrance and the cache of counts as tables of 80 columns, as values for JSON and as panels."""

from collections.abc import Iterator, Sequence
from typing import Any

from lmlong.evaluation.document_sums import Sums
from lmlong.evaluation.recurrence import BUCKETS, KINDS, Kind
from lmlong.evaluation.results import CACHES, AtRecurrence, PerplexityReport
from lmlong.evaluation.sums_report import ERROR, change_values, sum_values
from lmlong.recipe.lengths import name_length
from lmlong.report.figure import Line, Panel, Style, style
from lmlong.report.table import Column, format_table

RECURRENCE = [Column("length", 8), *(Column(name, 12, ".4f") for name in BUCKETS)]
REMEMBRANCE = [Column("text back to", 14), Column("divergence", 13, ".5f"), Column("±", 9, ".5f")]
GAIN = ERROR._replace(width=8)
CACHE = [Column("length", 8)]
for _title in ("context", "+unigram", "document", "+unigram"):
    CACHE += [Column(_title, 10, "+.4f"), GAIN]


def recurrence_lines(report: PerplexityReport) -> list[str]:
    """Return a table for tokens and one for words: the loss by bucket and length, and the change from the shortest."""
    if not report.recurrence:
        return []
    token, word = (list(_of_kind(report.recurrence, kind)) for kind in KINDS)
    return [*token, "", *word]


def _of_kind(points: Sequence[AtRecurrence], kind: Kind) -> Iterator[str]:
    first, last = (getattr(points[number], kind) for number in (0, -1))
    changes = [sums.above(before) for sums, before in zip(last, first, strict=True)]
    yield f"by recurrence: nats/token by how many tokens back the same {kind} last occurred"
    rows: list[list[Any]] = [["tokens", *(f"{sums.totals.tokens:,}" for sums in first)]]
    rows += [
        [name_length(point.length), *(sums.totals.nats_per_token for sums in getattr(point, kind))] for point in points
    ]
    if len(points) > 1:
        rows.append(["change", *(f"{change:+.4f}" if change == change else "-" for change, _ in changes)])
        rows.append(["±", *(error for _, error in changes)])
    yield from format_table(RECURRENCE, rows)


def remembrance_lines(report: PerplexityReport) -> list[str]:
    """Return a table of the divergence by how far back the point lies before which text is left out."""
    if not report.remembrance:
        return []
    rows = [
        [name_length(length), sums.totals.nats_per_token, sums.nats_error] for length, sums, _ in report.remembrance
    ]
    return [
        "remembrance: how far the text before a point changes the predictions, as KL",
        f"from those with {name_length(report.longest)} tokens before, in nats/token",
        *format_table(REMEMBRANCE, rows),
    ]


def cache_lines(report: PerplexityReport) -> list[str]:
    """Return a table of what counts add to the model."""
    if not report.cache:
        return []
    rows = [
        [name_length(length), *(cell for sums in mixed.values() for cell in _gain(model, sums))]
        for length, model, mixed in report.cache
    ]
    return [
        "cache baseline: nats/token that counts of bigrams and trigrams (and unigrams)",
        "add to the model, among the tokens it reads (context), or among all before",
        *format_table(CACHE, rows),
    ]


def _gain(model: Sums, mixed: Sums) -> tuple[float, float]:
    more, error = mixed.above(model)
    return -more, error


def values(report: PerplexityReport) -> dict[str, Any]:
    """Return the sums of these views, and the ratios made of them; changes are from the shortest length."""
    first = report.recurrence[0] if report.recurrence else None
    return {
        "recurrence": [
            {
                "length": point.length,
                **{
                    kind: {
                        name: {**sum_values(sums), **change_values(sums, before)}
                        for name, sums, before in zip(BUCKETS, getattr(point, kind), getattr(first, kind), strict=True)
                    }
                    for kind in KINDS
                },
            }
            for point in report.recurrence
        ],
        "remembrance": [
            {
                "length": length,
                "against": report.longest,
                "divergence": sums.totals.nats_per_token,
                "divergence_error": sums.nats_error,
                "tokens": sums.totals.tokens,
                "documents": sums.documents,
            }
            for length, sums, _ in report.remembrance
        ],
        "cache": [
            {
                "length": length,
                "model": sum_values(model),
                "mixed": {
                    name: {**sum_values(sums), **dict(zip(("gain", "gain_error"), _gain(model, sums), strict=True))}
                    for name, sums in mixed.items()
                },
            }
            for length, model, mixed in report.cache
        ],
    }


def panels(reports: Sequence[PerplexityReport]) -> list[Panel]:
    """Describe these views: recurrence by run and kind, the others with a line for each run."""
    several = len(reports) > 1
    found = [
        _recurrence_panel(report, kind, f"{report.name}: " if several else "")
        for report in reports
        for kind in KINDS
        if len(report.recurrence) > 1
    ]
    if any(report.remembrance for report in reports):
        found.append(_panel([_remembrance_line(*pair) for pair in enumerate(reports)], REMEMBRANCE_LABELS))
    if any(report.cache for report in reports):
        found.append(_panel([text for pair in enumerate(reports) for text in _cache_lines(*pair)], CACHE_LABELS))
    return found


REMEMBRANCE_LABELS = ("tokens back to a point", "KL without the text before it, nats/token")
CACHE_LABELS = ("tokens read before the same targets", "nats/token that counts add\n(hollow: of all tokens before)")


def _recurrence_panel(report: PerplexityReport, kind: Kind, run: str) -> Panel:
    """Describe the change of each bucket's loss from the shortest length."""
    first = getattr(report.recurrence[0], kind)
    lengths = [point.length for point in report.recurrence]
    lines = []
    for number, name in enumerate(BUCKETS):
        changes = [getattr(point, kind)[number].above(first[number]) for point in report.recurrence]
        if first[number].totals.tokens:
            lines.append(_line(name, lengths, changes, style(number)))
    labels = ("tokens read before the same targets", "change in nats/token")
    return _panel(lines, labels)._replace(title=f"{run}same {kind} last seen", small=True, legend=True)


def _remembrance_line(number: int, report: PerplexityReport) -> Line:
    points = [(sums.totals.nats_per_token, sums.nats_error) for _, sums, _ in report.remembrance]
    return _line(report.name, [point.length for point in report.remembrance], points, style(number))


def _cache_lines(number: int, report: PerplexityReport) -> list[Line]:
    """Describe the gain by bigrams and trigrams, of the context (filled) and of the document (hollow)."""
    lengths, look = [at.length for at in report.cache], style(number)
    return [
        _line(
            report.name if CACHES[name].counts == "context" else None,
            lengths,
            [_gain(at.model, at.mixed[name]) for at in report.cache],
            look._replace(hollow=CACHES[name].counts == "document"),
        )
        for name in CACHES
        if CACHES[name].lowest == 2
    ]


def _line(name: str | None, lengths: list[int], points: Sequence[tuple[float, float]], look: Style) -> Line:
    """Describe values with a band of two of their errors."""
    low, high = ([value + 2 * sign * error for value, error in points] for sign in (-1, 1))
    return Line(name, lengths, [value for value, _ in points], look, low, high)


def _panel(lines: Sequence[Line], labels: tuple[str, str]) -> Panel:
    ticks = sorted({int(x) for each in lines for x in each.x})
    return Panel(lines, x_label=labels[0], y_label=labels[1], ticks=ticks, tick_name=name_length)
