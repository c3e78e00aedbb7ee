"""Results of a perplexity measurement, as sums for each document; ratios and errors follow from them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from lmlong.evaluation.document_sums import UNKNOWN, Estimate, Sums
from lmlong.evaluation.recurrence import BUCKETS, KINDS, Kind
from lmlong.evaluation.state_health import Health
from lmlong.model.precision import Precision
from lmlong.model.quantization import Weights
from lmlong.model.state_size import StateSize
from lmlong.report.json_values import declared, json_keys


class AtLength(NamedTuple):
    """The same targets, read with one length of context."""

    length: int
    sums: Sums
    seconds: float


@json_keys("*sums", "change=nats.value", "change_error=nats.error")
class Change(NamedTuple):
    """Sums, and how they differ from others of the same targets."""

    sums: Sums
    base: Sums | None

    @property
    def nats(self) -> Estimate:
        """The change in nats per token."""
        return self.sums.above(self.base) if self.base else UNKNOWN


@json_keys("length", "*change", "seconds")
class AtContext(NamedTuple):
    """The same targets at one length, and the change from the length before."""

    length: int
    change: Change
    seconds: float
    trained: bool  # whether the model was trained at this length


@json_keys("first", "last", "*sums")
class AtPosition(NamedTuple):
    """Targets with `first` to `last` tokens of their document before them."""

    first: int
    last: int
    sums: Sums


class AtRecurrence(NamedTuple):
    """The same targets at one length, in buckets by how far back the same token, or word, last occurred."""

    length: int
    token: list[Sums]  # of each bucket
    word: list[Sums]

    def changes(self, kind: Kind, base: "AtRecurrence") -> dict[str, Change]:
        """Return the sums of each bucket, and their change from another length."""
        pairs = zip(getattr(self, kind), getattr(base, kind), strict=True)
        return {name: Change(*pair) for name, pair in zip(BUCKETS, pairs, strict=True)}


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


@json_keys("*sums", "gain=nats.value", "gain_error=nats.error")
class Gain(NamedTuple):
    """The model mixed with the counts of one cache."""

    sums: Sums
    nats: Estimate  # per token, below those of the model alone


@json_keys("length", "model", "mixed=gains")
class CacheGain(NamedTuple):
    """The same targets at one length: the model alone, and mixed with the counts of each cache."""

    length: int
    model: Sums
    mixed: dict[str, Sums]

    @property
    def gains(self) -> dict[str, Gain]:
        more = {name: sums.above(self.model) for name, sums in self.mixed.items()}
        return {name: Gain(self.mixed[name], Estimate(-value, error)) for name, (value, error) in more.items()}


def gain_by(cache: str) -> Callable[[CacheGain], Estimate]:
    """Return the function that takes the gain by one cache from the gains at a length."""
    return lambda gain: gain.gains[cache].nats


class InWindows(NamedTuple):
    """All targets, read in windows of one length."""

    length: int
    reset: Sums
    sliding: Sums


class WindowChange(NamedTuple):
    """All targets, read in windows of one length, against the state carried."""

    length: int
    reset: Change
    sliding: Change


@json_keys(
    "run=name",
    "checkpoint",
    "parameters",
    "trained_length",
    "precision",
    "weights",
    "data",
    "trained_tokens",
    "carried_states",
    "state_numbers=state.empty.numbers",
    "state_bytes=state.empty.bytes",
    "state_numbers_per_token=state.per_token.numbers",
    "documents",
    "parts_of",
    "cluster_by",
    "clusters",
    "tokens_read=tokens",
    "seconds",
    "peak_bytes",
    "left_out",
    "context=by_context",
    "recurrence=recurrence_changes",
    "remembrance=divergences",
    "cache",
    "position",
    "carried",
    "windows=window_changes",
    "state=health",
)
@dataclass(repr=False)
class PerplexityReport:
    """The results of one model."""

    name: str
    checkpoint: str
    parameters: int
    state: StateSize
    trained_length: int
    precision: Precision = "32"  # of the forward pass
    weights: Weights = "32"  # the format of the weight matrices
    data: list[str] = field(default_factory=list)  # the files of the text, if they were named
    trained_tokens: int | None = None  # seen in training, with repetition; None if unknown
    carried_states: bool = False  # whether training rows began with the state of the row before
    documents: int = 0
    cluster_by: str | None = None  # the field by which documents count as one for the errors
    clusters: int | None = None
    parts_of: int | None = None  # the number of documents, if these are parts of them, each read from an empty state
    text: str = ""  # hash of the documents, independent of the tokenizer
    tokenizer: str = ""  # hash
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
    tokens: int = 0  # read in total
    seconds: float = 0.0
    peak_bytes: int | None = 0  # None where the system does not report it

    def __repr__(self) -> str:
        bits = [f"{sums.totals.bits_per_byte:.4f} bits/byte at {length}" for length, sums, _ in self.context]
        return f"<PerplexityReport {self.name}: {', '.join(bits) or 'no contexts'}>"

    @property
    def unit(self) -> str:
        """The unit that sums are kept for and errors are over."""
        return "document" if self.parts_of is None else "part"

    @property
    def by_context(self) -> list[AtContext]:
        befores = [None, *(point.sums for point in self.context)]
        return [
            AtContext(length, Change(sums, before), seconds, length == self.trained_length)
            for (length, sums, seconds), before in zip(self.context, befores, strict=False)
        ]

    @property
    def recurrence_changes(self) -> list[dict[str, Any]]:
        """The sums of each bucket by length, with the change from the shortest length."""
        return [
            {"length": point.length, **{kind: point.changes(kind, self.recurrence[0]) for kind in KINDS}}
            for point in self.recurrence
        ]

    @property
    def divergences(self) -> list[dict[str, Any]]:
        """The divergence at each length from the predictions at the longest."""
        keys = ("divergence=per_token.value", "divergence_error=nats_error", "tokens=totals.tokens", "documents")
        return [
            {"length": length, "against": self.longest, **declared(sums, keys)} for length, sums, _ in self.remembrance
        ]

    @property
    def window_changes(self) -> list[WindowChange]:
        return [
            WindowChange(length, Change(reset, self.carried), Change(sliding, self.carried))
            for length, reset, sliding in self.windows
        ]

    @property
    def longest(self) -> int:
        """The longest length at which targets were scored."""
        return self.lengths[-1]
