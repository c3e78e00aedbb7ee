"""What Linformer is measured over, as a user may set it; imports no torch, so that help is quick."""

from typing import NamedTuple

from lmlong.errors import UsageError


class Grid(NamedTuple):
    """Shapes of the layers that are compared; those of the base model of the paper, where nothing else is asked for."""

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
    slots: tuple[int, ...] = (128, 256, 512, 1024)
    width: int = 768
    heads: int = 12
    rows: int = 1
    limit: float = 20.0
    """Seconds that one pass may take; what would take longer is left out."""


USUAL = Grid()


def check(grid: Grid) -> None:
    """Refuse what cannot be built."""
    for slots in grid.slots:
        if slots < 1:
            raise UsageError(f"--slots: {slots} cannot be used. Give numbers above 0.")
    if min(grid.slots) > max(grid.lengths):
        raise UsageError(
            f"--slots: {min(grid.slots)} are more than the {max(grid.lengths):,} tokens of the longest input. "
            "Give fewer slots, or longer --lengths."
        )
    if grid.width % grid.heads:
        raise UsageError(f"--heads: {grid.heads} do not divide a width of {grid.width}. Use a divisor.")
