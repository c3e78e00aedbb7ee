"""The settings of the Linformer benchmark; imports no torch, so that --help is fast."""

from typing import NamedTuple

from lmlong.errors import UsageError


class LinformerGrid(NamedTuple):
    """Shapes of the layers that are compared; the defaults are those of the base model of the paper."""

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
    slots: tuple[int, ...] = (128, 256, 512, 1024)
    width: int = 768
    heads: int = 12
    rows: int = 1
    limit: float = 20.0
    """Longest time of one pass in seconds; slower ones are left out."""

    def check(self) -> None:
        """Raise a UsageError for settings that cannot be built."""
        for slots in self.slots:
            if slots < 1:
                raise UsageError(f"--slots: {slots} cannot be used. Give numbers above 0.")
        if min(self.slots) > max(self.lengths):
            raise UsageError(
                f"--slots: {min(self.slots)} are more than the {max(self.lengths):,} tokens of the longest input. "
                "Give fewer slots, or longer --lengths."
            )
        if self.width % self.heads:
            raise UsageError(f"--heads: {self.heads} do not divide a width of {self.width}. Use a divisor.")


DEFAULT = LinformerGrid()
