"""Plans of runs: their memory and time, by a model fitted to short steps, and how to fit them into less memory."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from lmlong.data.batches import evenly
from lmlong.data.data_module import DATA_MODULES
from lmlong.data.token_dataset import TokenDataset, prepare
from lmlong.model.base import count_parameters
from lmlong.model.build import build, without_memory
from lmlong.model.device import pick_device
from lmlong.model.memory import check_memory
from lmlong.recipe import Recipe
from lmlong.training.optimizer import count_steps
from lmlong.training.profile import BatchShape, StepProfile, profile_step

KEPT_CHECKPOINTS = 3
"""The newest, the best, and the one being written."""

SHORT = 8192
"""Tokens of the longer of two profiled steps, at most."""

PROFILED_WORK = 1e12
"""Operations that a profiled step on a CPU may take: some ten to twenty seconds of one core."""

PROFILED_SEGMENTS = 3

SHORTEST_SEGMENT = 64

LEAST_GROWTH = 0.25
"""Share of the time of a short step that is taken to grow with its tokens, whatever was measured."""


SAMPLED = 512
"""Forward passes whose lengths are looked up, evenly over the run."""


class StepCost(NamedTuple):
    """The cost of one step for one process: at the longest rows, and on average."""

    bytes: int
    seconds: float


class MemoryModel:
    """Memory and time by the tokens that are held at once, as a line through two short steps.

    Memory in use grows in proportion. Memory that the allocator of a CPU holds beyond it grows likewise at first, but
    not indefinitely: half of its growth is counted. With segments, the states between them are added; the time of
    softmax and full attention grows with the square of the length.
    """

    def __init__(
        self, recipe: Recipe, rows: int, segmented: bool, lengths: Sequence[int] = (), tokens: int | None = None
    ):
        """`lengths` are those of the rows of some forward passes, by default all of text.sequence_length. Steps of
        up to `tokens` tokens are profiled, by default SHORT."""
        self.recipe, self.rows, self.segmented, self.tokens = recipe, rows, segmented, tokens
        self.lengths = Counter(lengths or [recipe.text.sequence_length])
        self.longest = max(self.lengths)
        self.squared = not segmented and recipe.model.quadratic
        length = recipe.training.segment or self.longest
        self.longer = min(length, max(SHORT // rows, 128) if tokens is None else max(tokens // rows, 32))
        self.shorter = self.longer // 2
        self.first, self.second = self._profile(exact=False)
        on_gpu = pick_device(recipe.device).type == "cuda"
        first, second = (self.first, self.second) if on_gpu else self._profile(exact=True)
        growths = (second.peak - first.peak, self.second.peak - self.first.peak)
        self.bytes_a_token = max(sum(growths) / 2, 0) / (rows * (self.longer - self.shorter))

    def _profile(self, exact: bool) -> tuple[StepProfile, StepProfile]:
        """Return the profiles of the shorter and of the longer step."""
        parts = PROFILED_SEGMENTS if self.segmented else 1
        first, second = (
            profile_step(self.recipe, BatchShape(self.rows, parts * time, time if self.segmented else None), exact)
            for time in (self.shorter, self.longer)
        )
        return first, second

    def cost(self, rows: int, segment: int | None) -> StepCost:
        """Return the cost of a step, that holds `segment` tokens of `rows` rows at once."""
        recipe = self.recipe
        length = self.longest
        held = min(segment or length, length)
        parts = -(-length // held)
        growth = self.bytes_a_token * (rows * held - self.rows * self.longer)
        states = rows * self.second.state * max(parts - PROFILED_SEGMENTS, 0)
        memory = self.second.peak + growth + states + 17 * rows * length + self._distributed_bytes()
        passes = recipe.sequences_per_step // recipe.processes / rows
        work = sum(count * self._row_seconds(rows, held, length) for length, count in self.lengths.items())
        return StepCost(round(memory), passes * work / self.lengths.total() + self.second.update)

    def _row_seconds(self, rows: int, held: int, length: int) -> float:
        """Return the seconds of a forward and backward pass over `rows` rows of a length, `held` tokens at once."""
        held = min(held, length)
        return -(-length // held) * self._seconds(rows, held)

    def _seconds(self, rows: int, held: int) -> float:
        """Return the seconds of a forward and backward pass over `held` tokens of `rows` rows at once."""
        measured = PROFILED_SEGMENTS if self.segmented else 1
        first, second = self.first.work / measured, self.second.work / measured
        if self.squared:  # a time + b time^2, for as many rows as measured
            a, b = _line_through(self.shorter, first / self.shorter, self.longer, second / self.longer)
            return rows / self.rows * held * (a + max(b, 0) * held)
        tokens = self.longer * self.rows
        _, each = _line_through(self.shorter * self.rows, first, tokens, second)
        each = min(max(each, LEAST_GROWTH * second / tokens), second / tokens)  # other programs slow down either step
        return second + each * (rows * held - tokens)

    def _distributed_bytes(self) -> float:
        """Return the bytes that distributed training adds to those of a single process, less those that it saves."""
        recipe, count = self.recipe, self.second.parameters
        ranks, training = recipe.processes, recipe.training
        if training.strategy == "deepspeed":
            # alone: weights, gradients, moments; divided: the weights that are updated, moments, and by stage more
            whole = {1: 2, 2: 2, 3: 1}[training.deepspeed.stage]
            divided = {1: 2, 2: 2, 3: 3}[training.deepspeed.stage]
            alone, moments = 2.0 * count, self.second.moments
            return 4.0 * (whole * count + (divided * count + moments) / ranks - alone - moments)
        return 4.0 * count if ranks > 1 else 0.0  # the buckets of gradients


class Plan(NamedTuple):
    """The cost of a run."""

    recipe: Recipe
    parameters: int
    moments: int  # numbers that the optimizer keeps
    cost: StepCost
    memory: int | None  # available bytes
    proposal: tuple[list[str], StepCost] | None  # overrides with which it fits
    mean_length: float | None = None  # of a row, where documents make the rows differ; None for text.sequence_length

    @property
    def steps(self) -> int:
        """The steps that are expected, those that fit into training.minutes where these end before the others."""
        minutes = self.recipe.training.minutes
        fitting = [] if minutes is None else [max(1, round(60 * minutes / self.cost.seconds))]
        return min([count_steps(self.recipe.training, self.recipe.tokens_per_step), *fitting])

    @property
    def tokens_per_step(self) -> int:
        """The tokens of a step, on average where documents make the rows differ."""
        if self.mean_length is None:
            return self.recipe.tokens_per_step
        return round(self.recipe.sequences_per_step * self.mean_length)

    def text(self) -> str:
        """Return the plan as text."""
        tokens = self.tokens_per_step
        hours, minutes = divmod(round(self.steps * self.cost.seconds / 60), 60)
        disk = KEPT_CHECKPOINTS * 4 * (self.parameters + self.moments)  # float32
        about = "" if self.recipe.training.minutes is None else "about "
        nearly = "" if self.mean_length is None else "about "
        each = " in each process" if self.recipe.processes > 1 else ""
        lines = [
            f"parameters   {self.parameters:,}",
            f"steps        {about}{self.steps:,} of {nearly}{tokens:,} tokens: {self.steps * tokens:,} tokens in all",
            f"time         {self.cost.seconds:.2f} s a step: {hours} h {minutes:02d} min, validation not counted",
            f"memory       {self.cost.bytes / 1e9:.2f} GB at the peak of a step{each}",
            f"disk         {disk / 1e9:.2f} GB for checkpoints",
        ]
        return "\n".join(lines + self._advice())

    def _advice(self) -> list[str]:
        if self.memory is None:
            return []
        memory = f"{self.memory / 1e9:.2f} GB"
        if self.proposal is None:
            return [f"{memory:12} not enough, whatever the batch: make the model or text.sequence_length smaller"]
        overrides, cost = self.proposal
        if not overrides:
            return [f"{memory:12} enough, as it is"]
        return [
            f"{memory:12} enough with {' '.join(overrides)}",
            f"{'':12} {cost.bytes / 1e9:.2f} GB, {cost.seconds:.2f} s a step of as many sequences",
        ]


def make_plan(recipe: Recipe, memory: int | None = None) -> Plan:
    """Return the cost of a run, profiled by short steps, and the batch and segment with which it fits into `memory`."""
    tokens, training = prepare(recipe.text), recipe.training
    check_memory(recipe, tokens.tokenizer.vocabulary, pick_device(recipe.device))
    lengths = _row_lengths(recipe, tokens) if recipe.text.rows == "documents" else [recipe.text.sequence_length]
    few = _profiled_tokens(recipe, tokens.tokenizer.vocabulary)
    model = MemoryModel(recipe, training.batch_size, training.segment is not None, lengths, few)
    cost = model.cost(training.batch_size, training.segment)
    proposal = None
    if memory is not None:
        proposal = ([], cost) if cost.bytes <= memory else _fit(recipe, memory, model)
    mean = None if set(lengths) == {recipe.text.sequence_length} else sum(lengths) / len(lengths)
    return Plan(recipe, model.second.parameters, model.second.moments, cost, memory, proposal, mean)


def _row_lengths(recipe: Recipe, tokens: TokenDataset) -> list[int]:
    """Return the lengths of the rows of some forward passes, evenly over the run."""
    batches, training = DATA_MODULES[recipe.objective](recipe, tokens).training(), recipe.training
    passes = count_steps(training, recipe.tokens_per_step) * training.accumulate
    return [batches.length(number, recipe.processes) for number in evenly(passes, min(passes, SAMPLED))]


def _profiled_tokens(recipe: Recipe, vocabulary: int) -> int | None:
    """Return how many tokens a profiled step may have so that it takes PROFILED_WORK; None where SHORT are not more."""
    if pick_device(recipe.device).type != "cpu":
        return None
    with without_memory():
        parameters = count_parameters(build(recipe, vocabulary))
    tokens = int(PROFILED_WORK / (6 * parameters))  # forward and backward pass: 6 operations for each weight
    return tokens if tokens < SHORT else None


def _fit(recipe: Recipe, memory: int, model: MemoryModel) -> tuple[list[str], StepCost] | None:
    """Return the largest batch that fits, else the longest segment of one row; a step has the same sequences."""
    own = recipe.sequences_per_step // recipe.processes  # of each process
    sizes = [rows for rows in range(min(recipe.training.batch_size, own) - 1, 0, -1) if own % rows == 0]
    segment = recipe.training.segment
    for rows in sizes:
        if (cost := model.cost(rows, segment)).bytes <= memory:
            return [f"training.batch_size={rows}", f"training.accumulate={own // rows}"], cost
    if recipe.model.state_growth != "constant" or recipe.objective == "masked":
        return None  # it cannot be read in segments
    batch = ["training.batch_size=1", f"training.accumulate={own}"] if own > 1 else []
    model = model if model.segmented else MemoryModel(recipe, 1, True, list(model.lengths.elements()), model.tokens)
    segment = 1 << (((segment or model.longest) - 1).bit_length() - 1)
    while segment >= SHORTEST_SEGMENT:
        if (cost := model.cost(1, segment)).bytes <= memory:
            return [*batch, f"training.segment={segment}"], cost
        segment //= 2
    return None


def _line_through(x: float, y: float, x2: float, y2: float) -> tuple[float, float]:
    """Return the line through two points, as intercept and slope."""
    slope = (y2 - y) / (x2 - x)
    return y - slope * x, slope
