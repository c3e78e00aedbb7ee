"""What a run would take, and how it would fit into less memory: short steps, and how memory and time grow from them."""

from typing import NamedTuple

from lmlong.errors import UsageError
from lmlong.model.device import pick_device
from lmlong.recipe import Recipe
from lmlong.text.tokens import prepare
from lmlong.training.optimizer import count_steps
from lmlong.training.rehearsal import Shape, Taken, rehearse

KEPT_CHECKPOINTS = 3
"""The newest, the best, and the one being written."""

SHORT = 8192
"""Tokens of the longer one of two rehearsed steps, at most."""

REHEARSED_SEGMENTS = 3

SHORTEST_SEGMENT = 64


class Demand(NamedTuple):
    """What one process takes in each step of a run."""

    bytes: int
    seconds: float


class Growth:
    """How memory and time grow with the tokens that are held at once, drawn through two short steps.

    What is in use grows in proportion. What the allocator of a CPU holds beyond it grows likewise at first, but not for
    ever: half of its growth is counted. With segments, the states between them come on top; the time of softmax and
    full attention grows with the square of the length.
    """

    def __init__(self, recipe: Recipe, rows: int, segmented: bool):
        self.recipe, self.rows, self.segmented = recipe, rows, segmented
        self.squared = not segmented and bool({"softmax", "full"}.intersection(recipe.model.kinds))
        length = recipe.training.segment or recipe.text.sequence_length
        self.longer = min(length, max(SHORT // rows, 128))
        self.shorter = self.longer // 2
        self.first, self.second = self._rehearse(exact=False)
        on_gpu = pick_device(recipe.device).type == "cuda"
        first, second = (self.first, self.second) if on_gpu else self._rehearse(exact=True)
        slopes = (second.peak - first.peak, self.second.peak - self.first.peak)
        self.bytes_a_token = max(sum(slopes) / 2, 0) / (rows * (self.longer - self.shorter))

    def _rehearse(self, exact: bool) -> tuple[Taken, Taken]:
        shapes = [
            Shape(self.rows, REHEARSED_SEGMENTS * time, time) if self.segmented else Shape(self.rows, time, None)
            for time in (self.shorter, self.longer)
        ]
        first, second = (rehearse(self.recipe, shape, exact) for shape in shapes)
        return first, second

    def demand(self, rows: int, segment: int | None) -> Demand:
        """What a run takes that holds so many tokens of so many rows at once, and reads as many sequences a step."""
        recipe = self.recipe
        length = recipe.text.sequence_length
        held = min(segment or length, length)
        parts = -(-length // held)
        growth = self.bytes_a_token * (rows * held - self.rows * self.longer)
        states = rows * self.second.state * max(parts - REHEARSED_SEGMENTS, 0)
        memory = self.second.peak + growth + states + 17 * rows * length + self._of_others()
        passes = recipe.sequences_per_step // recipe.processes / rows
        return Demand(round(memory), passes * parts * self._work(rows, held) + self.second.update)

    def _work(self, rows: int, held: int) -> float:
        """Seconds of a forward and backward pass over so many tokens at once."""
        measured = REHEARSED_SEGMENTS if self.segmented else 1
        first, second = self.first.work / measured, self.second.work / measured
        if self.squared:  # a time + b time^2, for rows as many as were measured
            a, b = _through(self.shorter, first / self.shorter, self.longer, second / self.longer)
            return rows / self.rows * held * (a + max(b, 0) * held)
        once, each = _through(self.shorter * self.rows, first, self.longer * self.rows, second)
        return max(once, 0) + each * rows * held

    def _of_others(self) -> float:
        """Bytes that training together adds to what one process alone holds, and those that it takes away."""
        recipe, count = self.recipe, self.second.parameters
        ranks, training = recipe.processes, recipe.training
        if training.strategy == "deepspeed":
            # alone: weights, gradients, two means; divided: the weights that AdamW updates, means, and by stage more
            whole = {1: 2, 2: 2, 3: 1}[training.deepspeed.stage]
            divided = {1: 4, 2: 4, 3: 5}[training.deepspeed.stage]
            return 4.0 * count * (whole + divided / ranks - 4)
        return 4.0 * count if ranks > 1 else 0.0  # gradients in the buckets they travel in


class Plan(NamedTuple):
    """What a run would take."""

    recipe: Recipe
    parameters: int
    demand: Demand
    memory: int | None  # bytes that there are
    proposal: tuple[list[str], Demand] | None  # overrides with which it fits

    @property
    def steps(self) -> int:
        return count_steps(self.recipe.training, self.tokens_per_step)

    @property
    def tokens_per_step(self) -> int:
        return self.recipe.sequences_per_step * self.recipe.text.sequence_length

    def text(self) -> str:
        """The plan as lines to read."""
        tokens = self.tokens_per_step
        hours, minutes = divmod(round(self.steps * self.demand.seconds / 60), 60)
        # float32 weights, and AdamW's two means of the same size
        disk = KEPT_CHECKPOINTS * 3 * 4 * self.parameters
        each = " in each process" if self.recipe.processes > 1 else ""
        lines = [
            f"parameters   {self.parameters:,}",
            f"steps        {self.steps:,} of {tokens:,} tokens: {self.steps * tokens:,} tokens in all",
            f"time         {self.demand.seconds:.2f} s a step: {hours} h {minutes:02d} min, validation not counted",
            f"memory       {self.demand.bytes / 1e9:.2f} GB at the peak of a step{each}",
            f"disk         {disk / 1e9:.2f} GB for checkpoints",
        ]
        return "\n".join(lines + self._advice())

    def _advice(self) -> list[str]:
        if self.memory is None:
            return []
        there = f"{self.memory / 1e9:.2f} GB"
        if self.proposal is None:
            return [f"{there:12} not enough, whatever the batch: make the model or text.sequence_length smaller"]
        overrides, demand = self.proposal
        if not overrides:
            return [f"{there:12} enough, as it is"]
        return [
            f"{there:12} enough with {' '.join(overrides)}",
            f"{'':12} {demand.bytes / 1e9:.2f} GB, {demand.seconds:.2f} s a step of as many sequences",
        ]


def make_plan(recipe: Recipe, memory: int | None = None) -> Plan:
    """What a run takes, rehearsed by short steps, and with what batch and segment it fits into so much memory."""
    prepare(recipe.text)
    training = recipe.training
    growth = Growth(recipe, training.batch_size, training.segment is not None)
    demand = growth.demand(training.batch_size, training.segment)
    proposal = None
    if memory is not None:
        proposal = ([], demand) if demand.bytes <= memory else _fit(recipe, memory, growth)
    return Plan(recipe, growth.second.parameters, demand, memory, proposal)


def _fit(recipe: Recipe, memory: int, growth: Growth) -> tuple[list[str], Demand] | None:
    """The largest batch that fits, else the longest segment of one row; as many sequences a step in each case."""
    own = recipe.sequences_per_step // recipe.processes  # of each process
    sizes = [rows for rows in range(min(recipe.training.batch_size, own) - 1, 0, -1) if own % rows == 0]
    segment = recipe.training.segment
    for rows in sizes:
        if (demand := growth.demand(rows, segment)).bytes <= memory:
            return [f"training.batch_size={rows}", f"training.accumulate={own // rows}"], demand
    if "softmax" in recipe.model.kinds or recipe.objective == "masked":
        return None  # it cannot be read in segments
    batch = ["training.batch_size=1", f"training.accumulate={own}"] if own > 1 else []
    growth = growth if growth.segmented else Growth(recipe, 1, segmented=True)
    segment = 1 << (((segment or recipe.text.sequence_length) - 1).bit_length() - 1)
    while segment >= SHORTEST_SEGMENT:
        if (demand := growth.demand(1, segment)).bytes <= memory:
            return [*batch, f"training.segment={segment}"], demand
        segment //= 2
    return None


def parse_memory(text: str) -> int:
    """Bytes in a size such as 24GB, 800MB or 16GiB."""
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    number = text.upper().rstrip("KMGIB ")
    try:
        size = float(number) * units[text.upper()[len(number) :].strip()]
    except (ValueError, KeyError):
        size = 0.0
    if not 0 < size < 2**60:
        raise UsageError(f"--memory: '{text}' is no size. Write 24GB, 800MB or 16GiB.")
    return int(size)


def _through(x: float, y: float, x2: float, y2: float) -> tuple[float, float]:
    """The line through two points, as its height at 0 and its slope."""
    slope = (y2 - y) / (x2 - x)
    return y - slope * x, slope
