"""The saved form of a score, as it is checked before a later run continues it: anybody may have made the file."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from lmlong.surprisal.robust_score import CENTERS

MOST = 1 << 53
"""Largest count: float64 represents every integer up to it exactly."""

LARGEST_GAP = 4
"""Bytes that an input may have more or fewer than the text at one place, those of a character."""

Count = Annotated[int, Field(ge=0, le=MOST)]
Offset = Annotated[int, Field(ge=-MOST, le=MOST)]
Bits = Annotated[float, Field(ge=-1, le=float(MOST))]  # a sum of rounded ones may be a little below 0
Hex = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{2})*$")]


class Saved(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class SavedScores(Saved):
    """Of a `RobustScore`."""

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
            raise ValueError("taken_at is beyond the counts, or of no spread")
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
    """Of `Units`: the unit that is open."""

    number: Count
    place: Count
    begin: Count
    read: Count
    size: Count
    tokens: Count
    bits: Bits
    text: Hex
    gaps: SavedGaps

    @model_validator(mode="after")
    def _begins_before_its_end(self) -> "SavedUnit":
        if self.begin > self.place + self.gaps.passed + LARGEST_GAP:
            raise ValueError("the open unit begins after what was read")
        return self


class SavedPlace(Saved):
    """Of `io.arriving.Place`."""

    device: Annotated[int, Field(ge=0, lt=1 << 64)]
    inode: Annotated[int, Field(ge=0, lt=1 << 64)]
    offset: Count
    last: Hex


class SavedLines(Saved):
    number: Count
    offset: Count
    size: Count
    held: Hex


class SavedText(Saved):
    """Of one text, in the metadata of its state file."""

    place: Count
    not_read: Count
    undecoded: Annotated[Hex, StringConstraints(max_length=6)]
    unit: SavedUnit
    totals: SavedTotals
    by: Literal["token", "byte", "line", "record", "position"]
    file: SavedPlace


class SavedAbout(Saved):
    """Of records, in a file of their states; names of what they belong to are checked where it is opened."""

    model_config = ConfigDict(extra="allow")

    format: int
    names: list[str]
    field: str | None
    streams: Any
    file: SavedPlace
    lines: SavedLines
    totals: SavedTotals

    @model_validator(mode="after")
    def _names_once(self) -> "SavedAbout":
        if len(set(self.names)) != len(self.names):
            raise ValueError("a name comes twice")
        return self
