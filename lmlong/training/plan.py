"""Plans of runs: memory and time, by a model fitted to short steps, and a batch, a number of parts of each row or a
segment that fits into less memory."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from lmlong.data.batches import evenly
from lmlong.data.data_module import DATA_MODULES
from lmlong.data.token_dataset import TokenDataset, prepare
from lmlong.model.base import count_parameters
from lmlong.model.build import build, without_memory
from lmlong.model.device import describe_machine, pick_device
from lmlong.model.memory import check_memory
from lmlong.model.sequence_group import longest_part
from lmlong.recipe import Recipe
from lmlong.recipe.file import recipe_class
from lmlong.training.optimizer import count_steps
from lmlong.training.prepare import resolve
from lmlong.training.profile import BatchShape, StepProfile, profile_step
from lmlong.training.step_bytes import FLOAT32, ROW_BYTES, StepBytes, gathered_bytes, state_bytes, step_bytes

KEPT_CHECKPOINTS = 3
"""The newest, the best, and the one being written."""

LONGEST_PROFILED = 8192
"""Maximum tokens of the longer of the two profiled steps."""

PROFILED_WORK = 1e12
"""Operations of a profiled step on a CPU, at most: 10 to 20 seconds of one core."""

PROFILED_SEGMENTS = 3

SHORTEST_SEGMENT = 64

MINIMUM_GROWTH = 0.25
"""Minimum share of the time of a short step that is assumed to grow with its tokens."""


SAMPLED = 512
"""Number of forward passes, spread evenly over the run, whose row lengths are looked up."""


class StepCost(NamedTuple):
    """The cost of a step for one process: memory with the longest rows, time on average."""

    bytes: int
    seconds: float


class MemoryModel:
    """Memory and time as linear functions of the tokens held at once, fitted to two short steps.

    Memory in use grows in proportion to the tokens. The memory that a CPU allocator holds beyond it grows at first too,
    but not indefinitely, so half of its growth is counted. With segments, the states between them are added. The time
    of softmax and full attention grows with the square of the length.
    """

    def __init__(
        self, recipe: Recipe, rows: int, segmented: bool, lengths: Sequence[int] = (), tokens: int | None = None
    ):
        """Profile two steps. `lengths` are the row lengths of some forward passes, by default text.sequence_length. The
        longer step has up to `tokens` tokens, by default LONGEST_PROFILED."""
        self.recipe, self.rows, self.segmented, self.tokens = recipe, rows, segmented, tokens
        self.lengths = Counter(lengths or [recipe.text.sequence_length])
        self.longest = max(self.lengths)
        self.squared = not segmented and recipe.model.quadratic
        length = recipe.training.segment or longest_part(self.longest, recipe.training.sequence_parallel)
        self.longer = min(length, max(LONGEST_PROFILED // rows, 128) if tokens is None else max(tokens // rows, 32))
        self.shorter = self.longer // 2
        self.first, self.second = self._profile(exact=False)
        first, second = (self.first, self.second) if _is_on_gpu(recipe) else self._profile(exact=True)
        growths = (second.peak - first.peak, self.second.peak - self.first.peak)
        self.bytes_a_token = max(sum(growths) / 2, 0) / (rows * (self.longer - self.shorter))

    def _profile(self, exact: bool) -> tuple[StepProfile, StepProfile]:
        """Return the profiles of the shorter and the longer step."""
        parts = PROFILED_SEGMENTS if self.segmented else 1
        first, second = (
            profile_step(self.recipe, BatchShape(self.rows, parts * time, time if self.segmented else None), exact)
            for time in (self.shorter, self.longer)
        )
        return first, second

    def cost(self, rows: int, segment: int | None, parts: int | None = None) -> StepCost:
        """Return the cost of a step with `rows` rows, `parts` processes that read each of them, and `segment` tokens
        held at once."""
        recipe, parts = self.recipe, parts or self.recipe.training.sequence_parallel
        read = longest_part(self.longest, parts)
        held = min(segment or read, read)
        growth = self.bytes_a_token * (rows * held - self.rows * self.longer)
        states = rows * self.second.state * max(-(-read // held) - PROFILED_SEGMENTS, 0)
        memory = self.second.peak + growth + states + ROW_BYTES * rows * self.longest + self._distributed_bytes()
        if parts > 1:
            memory += rows * gathered_bytes(recipe, self.longest, parts)
        passes = recipe.sequences_per_step / (recipe.processes // parts) / rows
        work = sum(count * self._row_seconds(rows, held, length, parts) for length, count in self.lengths.items())
        return StepCost(round(memory), passes * work / self.lengths.total() + self.second.update)

    def _row_seconds(self, rows: int, held: int, length: int, parts: int) -> float:
        """Return the seconds of a forward and backward pass over a part of rows of a length, `held` tokens at once."""
        read = longest_part(length, parts)
        held = min(held, read)
        return -(-read // held) * self._seconds(rows, held, parts)

    def _seconds(self, rows: int, held: int, parts: int = 1) -> float:
        """Return the seconds of a forward and backward pass over `held` tokens of `rows` rows at once, by the last of
        the processes that read the rows."""
        measured = PROFILED_SEGMENTS if self.segmented else 1
        first, second = self.first.work / measured, self.second.work / measured
        if self.squared:  # a time + b time^2, for the measured number of rows
            a, b = _line_through(self.shorter, first / self.shorter, self.longer, second / self.longer)
            return rows / self.rows * held * (a + max(b, 0) * held * (2 * parts - 1))  # with the keys of all parts
        tokens = self.longer * self.rows
        _, each = _line_through(self.shorter * self.rows, first, tokens, second)
        each = min(max(each, MINIMUM_GROWTH * second / tokens), second / tokens)  # other programs slow down either step
        return second + each * (rows * held - tokens)

    def _distributed_bytes(self) -> int:
        """Return the bytes that distributed training adds to the memory of a single process; negative if it saves
        memory."""
        tables = self.recipe.model.table_numbers
        parameters, moments = self.second.parameters - tables, self.second.moments
        alone = FLOAT32 * (2 * parameters + tables + moments)
        return state_bytes(self.recipe, parameters, moments, _is_on_gpu(self.recipe)).total - alone


class Plan(NamedTuple):
    """The cost of a run."""

    recipe: Recipe
    parameters: int
    moments: int  # numbers that the optimizer keeps
    cost: StepCost
    memory: int | None  # available bytes
    proposal: tuple[list[str], StepCost] | None  # overrides with which the run fits
    mean_length: float | None = None  # of a row, if documents make row lengths differ; None for text.sequence_length
    tensors: StepBytes | None = None  # that each process holds, if they are known
    text_tokens: int = 0  # of the training text

    @property
    def steps(self) -> int:
        """The expected steps, limited by training.minutes if that ends the run first."""
        minutes = self.recipe.training.minutes
        fitting = [] if minutes is None else [max(1, round(60 * minutes / self.cost.seconds))]
        return min([count_steps(self.recipe.training, self.recipe.tokens_per_step, self.text_tokens), *fitting])

    @property
    def tokens_per_step(self) -> int:
        """The tokens of a step, on average if row lengths differ."""
        if self.mean_length is None:
            return self.recipe.tokens_per_step
        return round(self.recipe.sequences_per_step * self.mean_length)

    def text(self) -> str:
        """Return the plan as text."""
        tokens = self.tokens_per_step
        hours, minutes = divmod(round(self.steps * self.cost.seconds / 60), 60)
        time = f"{hours} h {minutes:02d} min{self.recipe.training.clock_note}"
        disk = KEPT_CHECKPOINTS * 4 * (self.parameters + self.moments)  # float32
        about = "" if self.recipe.training.minutes is None else "about "
        roughly = "" if self.mean_length is None else "about "
        parts, length = self.recipe.training.sequence_parallel, self.recipe.text.sequence_length
        each = " in each process" if self.recipe.processes > 1 else ""
        each += f", which reads {longest_part(length, parts):,} tokens of each row" if parts > 1 else ""
        lines = [
            f"device       {describe_machine(pick_device(self.recipe.device))}",
            f"parameters   {self.parameters:,}",
            f"steps        {about}{self.steps:,} of {roughly}{tokens:,} tokens: {self.steps * tokens:,} tokens in all",
            f"time         {self.cost.seconds:.2f} s a step: {time}, validation not counted",
            f"memory       {self.cost.bytes / 1e9:.2f} GB at the peak of a step{each}",
            *([] if self.tensors is None else [f"tensors      {self.tensors.text()}"]),
            f"disk         {disk / 1e9:.2f} GB for checkpoints",
        ]
        return "\n".join(lines + self._advice())

    def _advice(self) -> list[str]:
        if self.memory is None:
            return []
        memory = f"{self.memory / 1e9:.2f} GB"
        if self.proposal is None:
            return [f"{memory:12} not enough for any batch: make the model or text.sequence_length smaller"]
        overrides, cost = self.proposal
        if not overrides:
            return [f"{memory:12} enough, as it is"]
        return [
            f"{memory:12} enough with {' '.join(overrides)}",
            f"{'':12} {cost.bytes / 1e9:.2f} GB, {cost.seconds:.2f} s a step of the same number of sequences",
        ]


def make_plan(recipe: Recipe, memory: int | None = None) -> Plan:
    """Return the cost of a run, profiled by short steps, and a batch and segment that fit into `memory`."""
    training = recipe.training
    precision = resolve(training.precision, pick_device(recipe.device))
    training = training.model_copy(update={"precision": precision})
    recipe, tokens = recipe.model_copy(update={"training": training}), prepare(recipe.text)
    check_memory(recipe, tokens.tokenizer.vocabulary, pick_device(recipe.device))
    lengths = _row_lengths(recipe, tokens) if recipe.text.rows == "documents" else [recipe.text.sequence_length]
    profiled_tokens = _profiled_tokens(recipe, tokens.tokenizer.vocabulary)
    model = MemoryModel(recipe, training.batch_size, training.segment is not None, lengths, profiled_tokens)
    cost = model.cost(training.batch_size, training.segment)
    proposal = None
    if memory is not None:
        proposal = ([], cost) if cost.bytes <= memory else _fit(recipe, memory, model)
    mean = None if set(lengths) == {recipe.text.sequence_length} else sum(lengths) / len(lengths)
    tensors = None
    counted = not (training.segment or training.teacher or training.learn)
    if recipe.processes > 1 and recipe.objective == "causal" and counted:
        tensors = step_bytes(recipe, tokens.tokenizer.vocabulary, model.longest, _is_on_gpu(recipe))
    size = model.second
    return Plan(recipe, size.parameters, size.moments, cost, memory, proposal, mean, tensors, tokens.train_tokens)


def _is_on_gpu(recipe: Recipe) -> bool:
    return pick_device(recipe.device).type == "cuda"


def _row_lengths(recipe: Recipe, tokens: TokenDataset) -> list[int]:
    """Return the row lengths of some forward passes, spread evenly over the run."""
    batches, training = DATA_MODULES[recipe.objective](recipe, tokens).training(), recipe.training
    passes = count_steps(training, recipe.tokens_per_step, tokens.train_tokens) * training.accumulate
    return [batches.length(number, recipe.batches_at_once) for number in evenly(passes, min(passes, SAMPLED))]


def _profiled_tokens(recipe: Recipe, vocabulary: int) -> int | None:
    """Return the tokens of a profiled step that takes PROFILED_WORK; None if that allows LONGEST_PROFILED tokens."""
    if pick_device(recipe.device).type != "cpu":
        return None
    with without_memory():
        parameters = count_parameters(build(recipe, vocabulary)) - recipe.model.table_numbers
    tokens = int(PROFILED_WORK / (6 * parameters))  # forward and backward pass: 6 operations for each weight
    return tokens if tokens < LONGEST_PROFILED else None


def _fit(recipe: Recipe, memory: int, model: MemoryModel) -> tuple[list[str], StepCost] | None:
    """Return the largest batch that fits, else the fewest parts of each row, else the longest segment of one row; a
    step keeps its number of sequences."""
    training = recipe.training
    own = recipe.sequences_per_step // recipe.batches_at_once  # of each group of processes
    sizes = [rows for rows in range(min(training.batch_size, own) - 1, 0, -1) if own % rows == 0]
    segment = training.segment
    for rows in sizes:
        if (cost := model.cost(rows, segment)).bytes <= memory:
            return [f"training.batch_size={rows}", f"training.accumulate={own // rows}"], cost
    for parts in _more_parts(recipe):
        if (cost := model.cost(1, None, parts)).bytes <= memory:
            passes = own * parts // training.sequence_parallel
            batch = ["training.batch_size=1", f"training.accumulate={passes}"]
            return [f"training.sequence_parallel={parts}", *batch], cost
    if recipe.model.state_growth != "constant" or recipe.objective == "masked" or training.sequence_parallel > 1:
        return None  # segments need a constant state, causal layers and whole rows
    if training.learn:
        return None
    batch = ["training.batch_size=1", f"training.accumulate={own}"] if own > 1 else []
    model = model if model.segmented else MemoryModel(recipe, 1, True, list(model.lengths.elements()), model.tokens)
    segment = 1 << (((segment or model.longest) - 1).bit_length() - 1)
    while segment >= SHORTEST_SEGMENT:
        if (cost := model.cost(1, segment)).bytes <= memory:
            return [*batch, f"training.segment={segment}"], cost
        segment //= 2
    return None


def _more_parts(recipe: Recipe) -> list[int]:
    """Return the larger numbers of processes that can read a row together."""
    now = recipe.training.sequence_parallel
    return [parts for parts in range(2 * now, recipe.processes + 1, now) if _is_valid(recipe, parts)]


def _is_valid(recipe: Recipe, parts: int) -> bool:
    """Return whether the recipe is valid with `parts` processes for each row."""
    values = recipe.model_dump()
    values["training"]["sequence_parallel"] = parts
    try:
        recipe_class().model_validate(values)
    except ValueError:
        return False
    return True


def _line_through(x: float, y: float, x2: float, y2: float) -> tuple[float, float]:
    """Return the line through two points, as intercept and slope."""
    slope = (y2 - y) / (x2 - x)
    return y - slope * x, slope
