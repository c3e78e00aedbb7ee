"""The results of a perplexity measurement and their columns: sums for each document; ratios and errors follow."""

from dataclasses import dataclass, field
from typing import NamedTuple

from lmlong.evaluation.document_sums import UNKNOWN, Estimate, Sums
from lmlong.evaluation.state_health import Health
from lmlong.model.device import Precision
from lmlong.model.quantization import Weights
from lmlong.model.state_size import StateSize
from lmlong.recipe.lengths import name_length
from lmlong.report.json_values import json_keys
from lmlong.report.table import Column, format_range, with_error


class AtLength(NamedTuple):
    """The same targets, read with one length of context."""

    length: int
    sums: Sums
    seconds: float


@json_keys("length", "*sums", "change=change.value", "change_error=change.error", "seconds")
class AtContext(NamedTuple):
    """The same targets at one length, and the change from the length before."""

    length: int
    sums: Sums
    before: Sums | None  # at the length before
    seconds: float
    trained: bool  # whether the model was trained at this length

    @property
    def change(self) -> Estimate:
        """The change in nats per token."""
        return self.sums.above(self.before) if self.before else UNKNOWN


def format_perplexity(value: float) -> str:
    return f"{value:,.2f}" if value < 1e8 else f"{value:.2e}"


NATS = with_error(Column("nats/token", 12, ".4f", value="sums.per_token"))
BITS = with_error(Column("bits/byte", 11, ".4f", value="sums.per_byte"))
CONTEXT = [
    Column("length", 9, value=lambda row: name_length(row.length) + ("*" if row.trained else " ")),
    *NATS,
    Column("perplexity", 13, format_perplexity, value="sums.totals.perplexity"),
    *BITS,
    *with_error(Column("change", 10, "+.4f", value="change")),
]


@json_keys("first", "last", "*sums")
class AtPosition(NamedTuple):
    """Targets with `first` to `last` tokens of their document before them."""

    first: int
    last: int
    sums: Sums


POSITION = [
    Column("tokens before", 17, value=lambda row: format_range(row.first, row.last)),
    *NATS,
    *BITS,
    Column("tokens", 13, ",", value="sums.totals.tokens"),
]


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
    "tokens_read=tokens",
    "seconds",
    "peak_bytes",
    "left_out",
    "context=by_context",
    "position",
    "carried",
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
    parts_of: int | None = None  # the number of documents, if these are parts of them, each read from an empty state
    text: str = ""  # hash of the documents, independent of the tokenizer
    tokenizer: str = ""  # hash
    lengths: list[int] = field(default_factory=list)  # measured
    left_out: list[int] = field(default_factory=list)  # lengths that too few documents reach
    context: list[AtLength] = field(default_factory=list)
    position: list[AtPosition] = field(default_factory=list)
    carried: Sums | None = None  # all targets, the state carried from the beginning of each document
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
            AtContext(length, sums, before, seconds, length == self.trained_length)
            for (length, sums, seconds), before in zip(self.context, befores, strict=False)
        ]
