"""Drafts: likely next tokens, read together with the last token in one pass over the model's weights.

A draft is what followed the last tokens earlier in the text. It takes no part in sampling: each token is drawn from the
logits after the token before it, with the same random number as without drafts. If it is the drafted token, the step at
it is computed already. Otherwise the steps at the draft are discarded, with their states. So a text, its state and its
log-probabilities do not depend on drafts, to the bit; only its time does. A drafted token of probability p is accepted
with probability p, as in speculative sampling (Leviathan et al. 2023) from a draft that is certain.

The length of a draft depends on how often drafts were right so far, and on the measured time of passes. In a text in
which they seldom are right, each token takes a step of its own, and drafts rest: for some tokens none is considered.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from statistics import median

MAX_DRAFT = 8
"""Maximum number of tokens in a draft."""

LONGEST_MATCH = 16
"""Longer matches count as matches of this many tokens."""

MEMORY = 1 << 16
"""Minimum number of last tokens that are looked up in."""

MIN_GAIN = 1.2
"""Minimum expected speed of a pass with a draft, relative to single steps."""

IDLE_STEPS, LONGEST_REST = 8, 64
"""Tokens without a draft after which drafts rest for as many tokens; the maximum number of these tokens."""

LAST = 32
"""Values that count in a running average."""

FIRST_SINGLE_STEPS, MAX_PASSES = 3, 64
"""Single steps that are timed first; passes with a draft after which a single step is timed again."""


@dataclass
class DraftCounts:
    """What drafts did during a generation."""

    passes: int  # with a draft
    drafted: int  # tokens
    accepted: int

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        return DraftCounts(self.passes + other.passes, self.drafted + other.drafted, self.accepted + other.accepted)

    def __str__(self) -> str:
        share = self.accepted / max(self.drafted, 1)
        return f"drafts {self.accepted:,} of {self.drafted:,} tokens accepted ({share:.0%}) in {self.passes:,} passes"


class Lookup:
    """What followed the last tokens of a text earlier in it: the last four, or else the last two."""

    def __init__(self, tokens: Sequence[int] = ()):
        self._begin(tokens)

    def _begin(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens[:-1])
        pairs = [first << 32 | second for first, second in pairwise(self._tokens)]
        fours = [first << 64 | second for first, second in zip(pairs, pairs[2:], strict=False)]
        # Indices of the tokens that followed each n-gram last. Tuples as keys would be tracked by the garbage collector
        self._after_four, self._after_pair = dict(zip(fours, count(4))), dict(zip(pairs, count(2)))
        self._next: int | None = None  # index of the token that is expected next
        self.matched = 0  # number of last tokens that precede it too
        for token in tokens[-1:]:
            self.append(token)

    def append(self, token: int) -> None:
        """Append a token to the text."""
        tokens = self._tokens
        if self._next is not None and tokens[self._next] == token:
            self._next, self.matched = self._next + 1, self.matched + 1
        else:
            self._next, self.matched = None, 0
        tokens.append(token)
        if len(tokens) == 2 * MEMORY:
            self._begin(tokens[MEMORY:])
            return
        end = len(tokens)
        if end >= 2:
            pair = tokens[-2] << 32 | token
            if end >= 4:
                self._index(self._after_four, (tokens[-4] << 32 | tokens[-3]) << 64 | pair, 4)
            self._index(self._after_pair, pair, 2)

    def _index(self, after: dict[int, int], ngram: int, size: int) -> None:
        """Note what follows the last `size` tokens; expect what followed them before, if nothing is expected yet."""
        if self._next is None and ngram in after:
            self._next, self.matched = after[ngram], size
        after[ngram] = len(self._tokens)

    @property
    def expected(self) -> int | None:
        """The token that followed the last tokens earlier; None if they are new."""
        return None if self._next is None else self._tokens[self._next]

    def draft(self, size: int) -> list[int]:
        """Return the next `size` tokens as they followed earlier. A repetition that reaches the end continues."""
        if self._next is None:
            return []
        draft = self._tokens[self._next : self._next + size]
        while len(draft) < size:
            draft += draft[: size - len(draft)]
        return draft


@dataclass
class Average:
    """A running average of about the last `LAST` values."""

    value: float
    count: int

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, LAST)
        self.value += (value - self.value) / self.count


class Pace:
    """How many tokens of a draft are worth reading, by how often drafts were right and by the times of passes."""

    def __init__(self) -> None:
        self._right = [Average(matched / (matched + 4), 2) for matched in range(LONGEST_MATCH + 1)]
        self._singles: deque[float] = deque(maxlen=LAST)  # seconds of tokens without drafts
        self._additional = Average(0.4, 2)  # time of each token of a draft, relative to that
        self._passes = 0  # with a draft since the last single step

    def add_token(self, matched: int, right: bool) -> None:
        """Add whether a token that was expected after `matched` known tokens came."""
        self._right[min(matched, LONGEST_MATCH)].add(right)

    def add_pass(self, tokens: int, seconds: float) -> None:
        """Add the processor time of one token, or of a token and a draft after it. An outlier counts as little."""
        self._passes = 0 if tokens == 1 else self._passes + 1
        if tokens == 1:
            self._singles.append(seconds)
        else:
            self._additional.add(min(max(0.0, (seconds / median(self._singles) - 1) / (tokens - 1)), 1.5))

    def draft_size(self, matched: int) -> int:
        """Return how many tokens to draft after `matched` known tokens; 0 if single steps are faster."""
        if len(self._singles) < FIRST_SINGLE_STEPS or self._passes == MAX_PASSES:
            return 0
        gain, size, all_right, tokens = 1.0, 0, 1.0, 1.0
        for drafted in range(1, MAX_DRAFT + 1):
            all_right *= self._right[min(matched + drafted - 1, LONGEST_MATCH)].value
            if all_right <= gain * self._additional.value:  # then no longer draft gains more
                break
            tokens += all_right
            gain, size = tokens / (1 + self._additional.value * drafted), drafted
        return size if gain > MIN_GAIN else 0


class Drafts:
    """The drafts of one text."""

    def __init__(self, pace: Pace | None = None):
        self._pace = pace or Pace()
        self._lookup: Lookup  # from `begin` on
        self._new: list[int] = []  # tokens that were not looked up yet
        self._idle = self._rest = 0  # tokens since the last draft, and until the next lookup
        self._begun: float | None = None  # when the last pass began
        self._size = 0  # of its draft
        self._steps = 1  # taken since then, without the tokens of the draft
        self.counts = DraftCounts(0, 0, 0)

    def begin(self, tokens: Sequence[int]) -> None:
        """Begin with the last tokens of a text."""
        self._lookup, self._new = Lookup(tokens), []

    def append(self, token: int) -> None:
        """Append a token to the text."""
        self._new.append(token)

    def next(self) -> list[int]:
        """Return the tokens to read in one pass after the last token, before the pass begins."""
        if self._rest:
            self._rest -= 1
            return []
        self._look_up()
        self._time_last_pass()
        lookup = self._lookup
        self._size = 0 if lookup.expected is None else self._pace.draft_size(lookup.matched)
        if self._size:
            self._idle, self._steps = 0, 1
            self.counts.passes += 1
            self.counts.drafted += self._size
            return lookup.draft(self._size)
        self._idle += 1
        if self._idle >= IDLE_STEPS:
            self._rest = min(self._idle, LONGEST_REST)
            self._idle += self._rest
        self._steps = 1 + self._rest
        return []

    def _look_up(self) -> None:
        """Move the lookup to the last token of the text."""
        lookup = self._lookup
        for token in self._new:
            if lookup.expected is not None:
                self._pace.add_token(lookup.matched, lookup.expected == token)
            lookup.append(token)
        self._new = []

    def _time_last_pass(self) -> None:
        """Add the processor time since the last pass began: all that its tokens took, with drawing and writing them.
        Other programs would lengthen elapsed time, that of a long pass more often than that of a single step."""
        now = time.process_time()
        if self._begun is not None:
            self._pace.add_pass(1 + self._size, (now - self._begun) / self._steps)
        self._begun = now
