"""The slots experiment as tables, as JSON and as a plot."""

from collections.abc import Mapping, Sequence
from typing import Any

from lmlong.experiments.slots import EncoderResult, result_numbers
from lmlong.experiments.slots_data import SYMBOLS
from lmlong.experiments.slots_grid import SHARINGS, EncoderSetting, SlotsGrid
from lmlong.recipe import Masking
from lmlong.report.figure import Figure, Level, Line, Panel, Style, style
from lmlong.report.json_values import json_values
from lmlong.report.table import Cell, Column, format_rows, format_table

Results = Mapping[EncoderSetting, EncoderResult]

ABOVE_FULL = (Column("above full", 12, "+.4f"), Column("±", 8, ".4f"))


def table(grid: SlotsGrid, results: Results) -> str:
    """Return for an 80-column terminal: words by slots, by sharing and by length, then copies."""
    hidden = f"{Masking().share:.0%} of held-out words hidden"
    lines = [
        f"{hidden} from encoders of width {grid.width}, after {grid.steps} steps",
        "",
        *_by_slots(grid, results),
        "",
        *_by_length(grid, results),
        "",
        f"hidden symbols of a second half that repeats the first, found; by chance {1 / SYMBOLS:.3f}",
        *_copies(grid, results),
    ]
    return "\n".join(lines)


def _by_slots(grid: SlotsGrid, results: Results) -> list[str]:
    """Return words with full attention, by number of slots, and by sharing."""
    shortest = grid.lengths[0]
    columns = [
        Column(f"{shortest:,} tokens", 16, align="<"),
        Column("sharing", 12, align="<"),
        Column("perplexity", 10, ".2f"),
        Column("nats/token", 12, ".4f"),
        *ABOVE_FULL,
    ]
    full = results[EncoderSetting("words", shortest, None)]

    def row(slots: int, sharing: str) -> list[Cell]:
        result = results[EncoderSetting("words", shortest, slots, sharing)]
        return [_name(slots), sharing, result.perplexity, result.nats_per_token, *result.above(full)]

    by_slots = [row(slots, "headwise") for slots in grid.slots]
    by_sharing = [row(grid.fixed, sharing) for sharing in SHARINGS]
    lines = format_table(columns, [["full", "", full.perplexity, full.nats_per_token], *by_slots])
    return [*lines, "", *format_rows(columns, by_sharing)]


def _by_length(grid: SlotsGrid, results: Results) -> list[str]:
    above, error = ABOVE_FULL
    columns = [
        Column("tokens", 7, ","),
        Column("full", 12, ".2f"),
        Column(_name(grid.fixed), 12, ".2f"),
        Column("   perplexity", 13),
        above._replace(width=16),
        error,
    ]
    rows: list[list[Cell]] = []
    for length in grid.lengths:
        exact, short = (results[EncoderSetting("words", length, slots)] for slots in (None, grid.fixed))
        rows.append([length, exact.perplexity, short.perplexity, None, *short.above(exact)])
    return format_table(columns, rows)


def _copies(grid: SlotsGrid, results: Results) -> list[str]:
    numbers = (None, *grid.slots)
    columns = [
        Column("tokens", 7, ","),
        Column("back", 8, ","),
        *(Column(_name(slots), 13, ".3f") for slots in numbers),
    ]
    rows: list[list[Cell]] = []
    for length in grid.copies:
        found = [results.get(EncoderSetting("copies", length, slots)) for slots in numbers]
        rows.append([length, length // 2, *(result.accuracy if result else None for result in found)])
    return format_table(columns, rows)


def _name(slots: int | None) -> str:
    return "full" if slots is None else f"k = {slots}"


def to_json(results: Sequence[EncoderResult]) -> list[dict[str, Any]]:
    """Return every encoder's sums and counts, by block, and the ratios made of them."""
    return json_values(
        [
            {
                **result.setting._asdict(),
                **result_numbers(result),
                "nats_per_token": result.nats_per_token,
                "perplexity": result.perplexity,
                "accuracy": result.accuracy,
            }
            for result in results
        ]
    )


def figure(grid: SlotsGrid, results: Results) -> Figure:
    """Describe nats against slots and against length, and copies against length."""
    shortest = grid.lengths[0]
    in_slots = [results[EncoderSetting("words", shortest, slots)].nats_per_token for slots in grid.slots]
    full = results[EncoderSetting("words", shortest, None)].nats_per_token
    by_slots = Panel(
        [Line("Linformer", grid.slots, in_slots, style(1))],
        title=f"hidden words, {shortest:,} tokens",
        x_label="slots k",
        y_label="nats a token",
        ticks=grid.slots,
        levels=[Level(full, Style(style(0).color), label="full")],
        legend=True,
    )
    by_length = Panel(
        [_words_line(grid, results, slots, number) for number, slots in enumerate((None, grid.fixed))],
        title="hidden words",
        x_label="tokens",
        y_label="nats a token",
        ticks=grid.lengths,
        legend=True,
    )
    copies = Panel(
        [_copies_line(grid, results, slots, number) for number, slots in enumerate((None, *grid.slots))],
        title="copies from half a text back",
        x_label="tokens",
        y_label="share found",
        ticks=grid.copies,
        levels=[Level(1 / SYMBOLS, Style("0.6", ":"), label="chance")],
        y_range=(0, 1.03),
        legend=True,
    )
    return Figure([[by_slots, by_length, copies]], size=(12.0, 4.2))


def _words_line(grid: SlotsGrid, results: Results, slots: int | None, number: int) -> Line:
    nats = [results[EncoderSetting("words", length, slots)].nats_per_token for length in grid.lengths]
    return Line(_name(slots), grid.lengths, nats, style(number))


def _copies_line(grid: SlotsGrid, results: Results, slots: int | None, number: int) -> Line:
    lengths = [length for length in grid.copies if EncoderSetting("copies", length, slots) in results]
    accuracies = [results[EncoderSetting("copies", length, slots)].accuracy for length in lengths]
    return Line(_name(slots), lengths, accuracies, style(number))
