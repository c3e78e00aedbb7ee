"""Results of a perplexity measurement, as sums for each document; ratios and errors follow from them."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lmlong.evaluation.document_sums import Sums
from lmlong.evaluation.state_health import Health
from lmlong.model.precision import Precision
from lmlong.model.state_size import StateSize


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


class AtRecurrence(NamedTuple):
    """The same targets at one length, told apart by how far back the same token, or word, last occurred."""

    length: int
    token: list[Sums]  # of each bucket
    word: list[Sums]


class Cache(NamedTuple):
    """Counts that are mixed with the model."""

    counts: Literal["context", "document"]
    """Of the tokens that the model reads before the target, or of all before it."""
    lowest: int
    """The lowest order of n-grams; the highest is 3."""


CACHES = {
    "context": Cache("context", 2),
    "context_unigram": Cache("context", 1),
    "document": Cache("document", 2),
    "document_unigram": Cache("document", 1),
}


class CacheGain(NamedTuple):
    """The same targets at one length: the model alone, and mixed with the counts of each cache."""

    length: int
    model: Sums
    mixed: dict[str, Sums]


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
    precision: Precision = "32"  # of the forward pass
    trained_tokens: int | None = None  # seen in training, the same ones several times perhaps; None if unknown
    carried_states: bool = False  # whether rows of that length began with states of what was read before
    documents: int = 0
    cluster_by: str | None = None  # the field by which documents count as one for the errors
    clusters: int | None = None
    parts_of: int | None = None  # where these are parts of so few documents, each read from an empty state
    text: str = ""  # the same for the same documents, whatever the tokenizer
    lengths: list[int] = field(default_factory=list)  # measured
    left_out: list[int] = field(default_factory=list)  # lengths that too few documents reach
    context: list[AtLength] = field(default_factory=list)
    recurrence: list[AtRecurrence] = field(default_factory=list)
    remembrance: list[AtLength] = field(default_factory=list)  # sums of the divergence from the longest length
    cache: list[CacheGain] = field(default_factory=list)
    position: list[AtPosition] = field(default_factory=list)
    carried: Sums | None = None  # all targets, the state carried from the beginning of each document
    windows: list[InWindows] = field(default_factory=list)
    health: list[Health] = field(default_factory=list)
    tokens: int = 0  # read in all
    seconds: float = 0.0
    peak_bytes: int | None = 0  # None where the system does not tell

    @property
    def longest(self) -> int:
        """The longest length at which targets were scored."""
        return self.lengths[-1]
