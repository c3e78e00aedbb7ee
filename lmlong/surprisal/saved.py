"""Saved scores, which a later run continues: the metadata of a state file.

The file may come from anybody, so every value is validated.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, model_validator

from lmlong.surprisal.robust_score import CENTERS

MOST = 1 << 53
"""Largest count: float64 represents every integer up to it exactly."""

LARGEST_GAP = 4
"""Largest difference in bytes between input and text at one position: that of a character."""

Count = Annotated[int, Field(ge=0, le=MOST)]
Offset = Annotated[int, Field(ge=-MOST, le=MOST)]
Bits = Annotated[float, Field(ge=-1, le=float(MOST))]  # a sum of rounded values may be slightly below 0
Hex = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{2})*$")]


class Saved(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class SavedScores(Saved):
    """A `RobustScore`."""

    bins: list[Annotated[int, Field(ge=0, lt=len(CENTERS))]]
    counts: list[Annotated[int, Field(ge=1, le=MOST)]]
    taken_at: Count
    median: Annotated[float, Field(ge=0, le=float(MOST))]
    spread: Annotated[float, Field(ge=0, le=float(MOST))]

    @model_validator(mode="after")
    def _agrees(self) -> "SavedScores":
        if len(self.counts) != len(self.bins) or len(set(self.bins)) != len(self.bins) or sum(self.counts) > MOST:
            raise ValueError("bins and counts do not agree")
        if self.taken_at > sum(self.counts) or (self.taken_at and self.spread < CENTERS[1]):
            raise ValueError("taken_at exceeds the counts, or the spread is 0")
        return self


class SavedTotals(Saved):
    bits: Bits
    bytes: Count
    tokens: Count
    scores: SavedScores


class SavedGaps(Saved):
    passed: Offset
    ahead: list[Annotated[list[Offset], Field(min_length=2, max_length=2)]]

    @model_validator(mode="after")
    def _of_characters(self) -> "SavedGaps":
        if any(abs(more) > LARGEST_GAP for _, more in self.ahead):
            raise ValueError("a gap is larger than a character")
        return self


class SavedUnit(Saved):
    """The open unit of `Units`."""

    number: Count
    place: Offset
    begin: Count
    read: Count
    size: Count
    tokens: Count
    bits: Bits
    text: Hex
    gaps: SavedGaps

    @model_validator(mode="after")
    def _begins_before_its_end(self) -> "SavedUnit":
        if self.begin > max(self.place, 0) + self.gaps.passed + LARGEST_GAP:
            raise ValueError("the open unit begins after the end of the text")
        return self


class SavedFilePosition(Saved):
    """An `io.incoming_bytes.FilePosition`."""

    device: Annotated[int, Field(ge=0, lt=1 << 64)]
    inode: Annotated[int, Field(ge=0, lt=1 << 64)]
    offset: Count
    last: Hex


class SavedLines(Saved):
    number: Count
    offset: Count
    size: Count
    held: str  # in base64


class SavedText(Saved):
    """The score of one text, in the metadata of its state file."""

    place: Count
    not_read: Count
    undecoded: Annotated[Hex, StringConstraints(max_length=6)]
    unit: SavedUnit
    totals: SavedTotals
    by: Literal["token", "byte", "line", "position"]
    file: SavedFilePosition


class SavedRecords(Saved):
    """The score of records, in the metadata of the state before each of them."""

    lines: SavedLines
    totals: SavedTotals
    by: Literal["record"]
    field: str | None
    file: SavedFilePosition


_SAVED: TypeAdapter[SavedText | SavedRecords] = TypeAdapter(
    Annotated[SavedText | SavedRecords, Field(discriminator="by")]
)


def check_saved(saved: Any) -> None:
    """Raise ValueError unless plain values are a saved score."""
    _SAVED.validate_python(saved)
