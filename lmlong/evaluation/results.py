"""Results of a perplexity measurement, as sums for each document; ratios and errors follow from them."""

from dataclasses import dataclass, field
from typing import NamedTuple

from lmlong.evaluation.document_sums import Sums
from lmlong.evaluation.state_health import Health
from lmlong.inference.state_size import StateSize


class AtLength(NamedTuple):
    """The same targets, read with so much context."""

    length: int
    sums: Sums
    seconds: float


class AtPosition(NamedTuple):
    """Targets with `first` to `last` tokens of their document before them."""

    first: int
    last: int
    sums: Sums


class InWindows(NamedTuple):
    """All targets, read in windows of one length."""

    length: int
    reset: Sums
    sliding: Sums


@dataclass
class PerplexityReport:
    """The results of one model."""

    name: str
    checkpoint: str
    parameters: int
    state: StateSize
    trained_length: int
    trained_tokens: int | None = None  # seen in training, the same ones several times perhaps; None if unknown
    carried_states: bool = False  # whether rows of that length began with states of what was read before
    documents: int = 0
    parts_of: int | None = None  # where these are parts of so few documents, each read from an empty state
    text: str = ""  # the same for the same documents, whatever the tokenizer
    left_out: list[int] = field(default_factory=list)  # lengths that too few documents reach
    context: list[AtLength] = field(default_factory=list)
    position: list[AtPosition] = field(default_factory=list)
    carried: Sums | None = None  # all targets, the state carried from the beginning of each document
    windows: list[InWindows] = field(default_factory=list)
    health: list[Health] = field(default_factory=list)
    tokens: int = 0  # read in all
    seconds: float = 0.0
    peak_bytes: int | None = 0  # None where the system does not tell
