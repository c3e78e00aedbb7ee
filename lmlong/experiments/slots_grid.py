"""The settings of the slots experiment; imports no torch, so that help is quick."""

from typing import Literal, NamedTuple

from lmlong.errors import UsageError

SHARINGS = ("none", "headwise", "key-value", "layerwise")
"""Which parts share the projections E and F, from none to all."""

AT_ONCE = 4096
"""Tokens of one step of training, whatever the length of a text, and of one block of a test."""

Task = Literal["words", "copies"]


class SlotsGrid(NamedTuple):
    """Which encoders are trained, on what, and for how long."""

    slots: tuple[int, ...] = (16, 64, 256)
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096)
    copies: tuple[int, ...] = (64, 128, 256)
    """Lengths of the texts whose second half repeats the first."""
    steps: int = 200
    """Of training on words; on copies so many times COPYING."""
    width: int = 64
    seed: int = 0

    @property
    def fixed(self) -> int:
        """The k at which sharings and lengths are compared: the middle one."""
        return self.slots[len(self.slots) // 2]

    def check(self) -> None:
        """Refuse what cannot be built or read."""
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
"""Some 20 minutes of one core."""


class EncoderSetting(NamedTuple):
    """One encoder to train: full attention, or Linformer with so many slots."""

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
    found = [EncoderSetting("words", shortest, slots) for slots in (None, *grid.slots)]
    found += [EncoderSetting("words", shortest, grid.fixed, sharing) for sharing in SHARINGS]
    found += [EncoderSetting("words", length, slots) for length in grid.lengths for slots in (None, grid.fixed)]
    for length in grid.copies:
        found += [EncoderSetting("copies", length, slots) for slots in (None, *grid.slots) if (slots or 1) <= length]
    return list(dict.fromkeys(found))
