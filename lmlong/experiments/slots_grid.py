"""The settings of the slots experiment; imports no torch, so that --help is fast."""

from typing import Literal, NamedTuple

from lmlong.errors import UsageError

SHARINGS = ("none", "headwise", "key-value", "layerwise")
"""Which parts share the projections E and F, from none to all."""

AT_ONCE = 4096
"""Tokens of a training step, for texts of any length, and of a block of the test."""

Task = Literal["words", "copies"]


class SlotsGrid(NamedTuple):
    """Which encoders are trained, on what, and for how long."""

    slots: tuple[int, ...] = (16, 64, 256)
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096)
    copies: tuple[int, ...] = (64, 128, 256)
    """Lengths of the texts whose second half repeats the first."""
    steps: int = 200
    """Training steps on words; on copies COPYING times as many."""
    width: int = 64
    seed: int = 0

    @property
    def fixed(self) -> int:
        """The k at which sharings and lengths are compared: the middle one."""
        return self.slots[len(self.slots) // 2]

    def check(self) -> None:
        """Raise a UsageError for settings that cannot be built."""
        if self.slots[0] < 1:
            raise UsageError(f"--slots: {self.slots[0]} cannot be used. Give numbers above 0.")
        if self.slots[-1] > self.lengths[0]:
            raise UsageError(
                f"--slots: {self.slots[-1]} are more than the {self.lengths[0]} tokens of the shortest text. "
                "Give fewer slots, or longer --lengths."
            )
        for option, lengths in (("--lengths", self.lengths), ("--copies", self.copies)):
            for length in lengths:
                if length % 2 or length < 8 or AT_ONCE % length:
                    raise UsageError(
                        f"{option}: {length} tokens cannot be used. Give powers of 2, from 8 to {AT_ONCE:,}."
                    )


COPYING = 2

DEFAULT = SlotsGrid()
"""About 20 minutes on one core."""


class EncoderSetting(NamedTuple):
    """One encoder to train: with full attention, or with Linformer."""

    task: Task
    length: int
    slots: int | None
    sharing: str = "headwise"

    @property
    def name(self) -> str:
        attention = "full" if self.slots is None else f"{self.slots}-{self.sharing}"
        return f"{self.task}-{self.length}-{attention}"


def encoder_settings(grid: SlotsGrid) -> list[EncoderSetting]:
    """Return all encoders of a study: words by slots, by sharing and by length, and copies by slots and length."""
    shortest = grid.lengths[0]
    settings = [EncoderSetting("words", shortest, slots) for slots in (None, *grid.slots)]
    settings += [EncoderSetting("words", shortest, grid.fixed, sharing) for sharing in SHARINGS]
    settings += [EncoderSetting("words", length, slots) for length in grid.lengths for slots in (None, grid.fixed)]
    for length in grid.copies:
        settings += [EncoderSetting("copies", length, slots) for slots in (None, *grid.slots) if (slots or 1) <= length]
    return list(dict.fromkeys(settings))
