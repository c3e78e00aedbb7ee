"""What slots are worth, as tables and as a chart."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lmlong.bench.slots import Trained
from lmlong.bench.slots_data import SYMBOLS
from lmlong.bench.slots_grid import SHARINGS, Grid, Setting
from lmlong.charts import COLOURS, LINES, MARKERS, clear, name_places
from lmlong.recipe import Masking

Found = Mapping[Setting, Trained]


def table(grid: Grid, found: Found) -> str:
    """For an 80-column terminal: words by slots, by sharing and by length, then copies."""
    shortest = grid.lengths[0]
    full = Setting("words", shortest, None)
    lines = [
        f"{Masking().share:.0%} of held-out words hidden from encoders of width {grid.width}, after {grid.steps} steps",
        "",
        f"{f'{shortest:,} tokens':<16}{'sharing':<12}{'perplexity':>10}{'nats/token':>12}{'above full':>12}{'±':>8}",
        _words("full", "", found[full]),
    ]
    lines += [
        _words(f"k = {slots}", "headwise", found[Setting("words", shortest, slots)], found[full])
        for slots in grid.slots
    ]
    lines.append("")
    lines += [
        _words(f"k = {grid.fixed}", sharing, found[Setting("words", shortest, grid.fixed, sharing)], found[full])
        for sharing in SHARINGS
    ]
    lines += ["", f"{'tokens':>7}{'full':>12}{f'k = {grid.fixed}':>12}   perplexity{'above full':>16}{'±':>8}"]
    for length in grid.lengths:
        exact, short = (found[Setting("words", length, slots)] for slots in (None, grid.fixed))
        more, error = short.above(exact)
        lines.append(
            f"{length:>7,}{exact.perplexity:>12.2f}{short.perplexity:>12.2f}{'':13}{more:>+16.4f}{error:>8.4f}"
        )
    lines += [
        "",
        f"hidden symbols of a second half that repeats the first, found; by chance {1 / SYMBOLS:.3f}",
        f"{'tokens':>7}{'back':>8}" + "".join(f"{_name(slots):>13}" for slots in (None, *grid.slots)),
    ]
    for length in grid.copies:
        cells = [_accuracy(found.get(Setting("copies", length, slots))) for slots in (None, *grid.slots)]
        lines.append(f"{length:>7,}{length // 2:>8,}{''.join(cells)}")
    return "\n".join(lines)


def _words(name: str, sharing: str, each: Trained, full: Trained | None = None) -> str:
    line = f"{name:<16}{sharing:<12}{each.perplexity:>10.2f}{each.nats_per_token:>12.4f}"
    if full is None:
        return line
    more, error = each.above(full)
    return f"{line}{more:>+12.4f}{error:>8.4f}"


def _accuracy(each: Trained | None) -> str:
    return f"{'' if each is None else f'{each.accuracy:.3f}':>13}"


def draw(grid: Grid, found: Found, path: Path) -> None:
    """Nats against slots and against length, and copies against length, into an image file."""
    figure(grid, found).savefig(path, dpi=160)


def figure(grid: Grid, found: Found) -> Figure:
    drawn = Figure(figsize=(12.0, 4.2), layout="constrained")
    by_slots, by_length, copied = drawn.subplots(1, 3)
    shortest = grid.lengths[0]
    numbers = [found[Setting("words", shortest, slots)].nats_per_token for slots in grid.slots]
    _line(by_slots, grid.slots, numbers, 1, "Linformer")
    by_slots.axhline(found[Setting("words", shortest, None)].nats_per_token, color=COLOURS[0], label="full")
    _panel(by_slots, grid.slots, f"hidden words, {shortest:,} tokens", "slots k", "nats a token")
    for number, slots in enumerate((None, grid.fixed)):
        numbers = [found[Setting("words", length, slots)].nats_per_token for length in grid.lengths]
        _line(by_length, grid.lengths, numbers, number, _name(slots))
    _panel(by_length, grid.lengths, "hidden words", "tokens", "nats a token")
    for number, slots in enumerate((None, *grid.slots)):
        lengths = [length for length in grid.copies if Setting("copies", length, slots) in found]
        accuracies = [found[Setting("copies", length, slots)].accuracy for length in lengths]
        _line(copied, lengths, accuracies, number, _name(slots))
    copied.set_ylim(0, 1.03)
    copied.axhline(1 / SYMBOLS, color="0.6", linestyle=":", label="chance")
    _panel(copied, grid.copies, "copies from half a text back", "tokens", "share found")
    return drawn


def _line(axes: Axes, places: tuple[int, ...] | list[int], values: list[float], number: int, label: str) -> None:
    look = number % len(COLOURS)
    axes.plot(
        places,
        values,
        color=COLOURS[look],
        marker=MARKERS[look],
        markeredgecolor="white",
        markersize=7,
        linestyle=LINES[look],
        label=label,
    )


def _panel(axes: Axes, places: tuple[int, ...], title: str, across: str, up: str) -> None:
    name_places(axes, places, str)
    axes.set_title(title)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.legend(frameon=False, fontsize="small")
    clear(axes)


def _name(slots: int | None) -> str:
    return "full" if slots is None else f"k = {slots}"
