"""The slots experiment as tables, as JSON and as a plot."""

from collections.abc import Mapping, Sequence

from lmlong.experiments.slots import EncoderResult
from lmlong.experiments.slots_data import SYMBOLS
from lmlong.experiments.slots_grid import SHARINGS, EncoderSetting, SlotsGrid
from lmlong.recipe import Masking
from lmlong.report.figure import Figure, Level, Line, Panel, Style, lines_of, style
from lmlong.report.table import Column, format_rows, format_table, pivot_rows, with_error

Results = Mapping[EncoderSetting, EncoderResult]

ABOVE_FULL = Column("above full", 12, "+.4f")


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
    full = results[EncoderSetting("words", shortest, None)]
    columns = [
        Column(f"{shortest:,} tokens", 16, align="<", value=lambda result: _name(result.setting.slots)),
        Column("sharing", 12, align="<", value=lambda result: "" if result is full else result.setting.sharing),
        Column("perplexity", 10, ".2f", value="perplexity"),
        Column("nats/token", 12, ".4f", value="nats_per_token"),
        *with_error(ABOVE_FULL._replace(value=lambda result: (None, None) if result is full else result.above(full))),
    ]
    by_slots = [results[EncoderSetting("words", shortest, slots)] for slots in grid.slots]
    by_sharing = [results[EncoderSetting("words", shortest, grid.fixed, sharing)] for sharing in SHARINGS]
    return [*format_table(columns, [full, *by_slots]), "", *format_rows(columns, by_sharing)]


def _by_length(grid: SlotsGrid, results: Results) -> list[str]:
    above = ABOVE_FULL._replace(width=16, value=lambda pair: pair[1].above(pair[0]))
    columns = [
        Column("tokens", 7, ",", value=lambda pair: pair[0].setting.length),
        Column("full", 12, ".2f", value=lambda pair: pair[0].perplexity),
        Column(_name(grid.fixed), 12, ".2f", value=lambda pair: pair[1].perplexity),
        Column("   perplexity", 13, value=lambda pair: None),
        *with_error(above),
    ]
    rows = [
        [results[EncoderSetting("words", length, slots)] for slots in (None, grid.fixed)] for length in grid.lengths
    ]
    return format_table(columns, rows)


def _copies(grid: SlotsGrid, results: Results) -> list[str]:
    numbers = (None, *grid.slots)
    columns = [
        Column("tokens", 7, ","),
        Column("back", 8, ","),
        *(Column(_name(slots), 13, ".3f") for slots in numbers),
    ]
    accuracies = {
        (each.length, each.slots): (result.accuracy,) for each, result in results.items() if each.task == "copies"
    }
    rows = [[length, length // 2, *cells] for length, *cells in pivot_rows(grid.copies, numbers, accuracies)]
    return format_table(columns, rows)


def _name(slots: int | None) -> str:
    return "full" if slots is None else f"k = {slots}"


def figure(grid: SlotsGrid, results: Results) -> Figure:
    """Return nats against slots and against length, and copies against length."""

    def words(lengths: Sequence[int], slots: Sequence[int | None]) -> list[EncoderResult]:
        return [results[EncoderSetting("words", length, each)] for length in lengths for each in slots]

    shortest = grid.lengths[0]
    (full,) = words([shortest], [None])
    by_slots = Panel(
        [Line("Linformer", grid.slots, [each.nats_per_token for each in words([shortest], grid.slots)], style(1))],
        title=f"hidden words, {shortest:,} tokens",
        x_label="slots k",
        y_label="nats a token",
        ticks=grid.slots,
        levels=[Level(full.nats_per_token, Style(style(0).color), label="full")],
        legend=True,
    )
    by_length = Panel(
        lines_of(
            {slots: words(grid.lengths, [slots]) for slots in (None, grid.fixed)},
            "setting.length",
            "nats_per_token",
            label=_name,
        ),
        title="hidden words",
        x_label="tokens",
        y_label="nats a token",
        ticks=grid.lengths,
        legend=True,
    )
    of_copies = {
        slots: [result for each, result in results.items() if (each.task, each.slots) == ("copies", slots)]
        for slots in (None, *grid.slots)
    }
    copies = Panel(
        lines_of(of_copies, "setting.length", "accuracy", label=_name),
        title="copies from half a text back",
        x_label="tokens",
        y_label="share found",
        ticks=grid.copies,
        levels=[Level(1 / SYMBOLS, Style("0.6", ":"), label="chance")],
        y_range=(0, 1.03),
        legend=True,
    )
    return Figure([[by_slots, by_length, copies]], size=(12.0, 4.2))
