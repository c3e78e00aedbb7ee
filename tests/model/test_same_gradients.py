"""A loss, its gradients and the state after it are the same in segments, with activations recomputed, by the policy of
a GPU, and in parts that several processes read, which here are threads of one process."""

import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any, NamedTuple

import pytest
import torch
from machine import needs_compiler
from model.shapes import LINEAR, SHAPES, shaped
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lmlong import recipe
from lmlong.attention.device_policy import CPU_POLICY, GPU_POLICY, DevicePolicy, use_policy
from lmlong.attention.laws import error
from lmlong.errors import UsageError
from lmlong.model.language_model import LanguageModel
from lmlong.model.metrics import text_nll
from lmlong.model.segments import loss_of_part, text_loss
from lmlong.model.sequence_group import SequenceGroup
from lmlong.model.state import concat_states, detach_state, state_tensors
from lmlong.model.stretch import any_phase

VOCABULARY, TOKENS = 20, 100
KINDS = (
    *("elu", "channel", "relu", "taylor", "favor", "delta", "window", "sink", "window beside", "window beside delta"),
    *("softmax", "ngram"),
)
MODELS = (*KINDS, "own heads", "like Llama", "softmax like Llama", "conv of blocks", "hourglass", "growing hourglass")


def build(name: str, policy: DevicePolicy = CPU_POLICY, **more: Any) -> LanguageModel:
    model = shaped({**SHAPES[name], "width": 16, **more}, deviation=0.3, vocabulary=VOCABULARY).train().double()
    model.set_state_dtype(torch.float64)
    use_policy(model, policy)
    return model


def text(starts: list[int], rows: int = 2, time: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, targets and document starts; documents start in the first row only."""
    tokens = torch.randint(VOCABULARY, (rows, time + 1), generator=torch.Generator().manual_seed(1))
    document_starts = torch.zeros(rows, time, dtype=torch.bool)
    document_starts[0, starts] = True
    return tokens[:, :-1], tokens[:, 1:].clone(), document_starts


Batch = tuple[Tensor, Tensor, Tensor | None]

BORDERS = [0, 7, 33, 34, 35, 49, 50, 51, TOKENS - 2]
"""Documents that start on, before and after the ends of segments and parts."""


class Computed(NamedTuple):
    loss: Tensor
    after: Any  # the state
    grads: list[Tensor]


def computed(
    model: LanguageModel,
    batch: Batch,
    state: Any = None,
    segment: int | None = None,
    recompute: bool = False,
    policy: DevicePolicy = CPU_POLICY,
) -> Computed:
    use_policy(model, policy)
    model.activation_checkpointing = recompute
    loss, after = text_loss(model, *batch, state, segment=segment)
    return Computed(loss.detach(), detach_state(after), gradients_of(loss, model))


def gradients_of(loss: Tensor, model: LanguageModel) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True))


class Threads(SequenceGroup):
    """The group of a thread. All threads wait for each other in each exchange."""

    bytes_sent = 0
    """What this thread has added to exchanges, to each of the others."""

    def __init__(self, rank: int, size: int, barrier: Barrier, given: list[Tensor | None]):
        self.rank, self.size, self.barrier, self.given = rank, size, barrier, given

    def _all(self, x: Tensor) -> list[Tensor]:
        self.given[self.rank] = x
        self.barrier.wait(timeout=60)
        every = [x for x in self.given if x is not None]
        self.barrier.wait(timeout=60)
        return every

    def gather(self, x: Tensor) -> Tensor:
        self.bytes_sent += x.nbytes * (self.size - 1)
        return torch.stack(self._all(x))

    def sum_of_own(self, x: Tensor) -> Tensor:
        self.bytes_sent += x.nbytes // self.size * (self.size - 1)
        return torch.stack([each[self.rank] for each in self._all(x)]).sum(0)

    def from_last(self, x: Tensor) -> Tensor:
        return self._all(x)[-1]


def in_threads(size: int, work: Callable[[Threads], Any]) -> list[Any]:
    """Return the results of some work by each process of a group."""
    barrier, given = Barrier(size), [None] * size

    def run(rank: int) -> Any:
        try:
            return work(Threads(rank, size, barrier, given))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


def in_parts(
    model: LanguageModel, batch: Batch, state: Any = None, size: int = 3, policy: DevicePolicy = CPU_POLICY
) -> Computed:
    use_policy(model, policy)

    def of_part(group: SequenceGroup) -> Computed:
        loss, after = loss_of_part(model, *batch, state, group)
        grads = gradients_of(loss, model)
        return Computed(loss.detach(), group.state_after(detach_state(after)) if model.constant_state else None, grads)

    losses, states, grads = zip(*in_threads(size, of_part), strict=True)
    return Computed(sum(losses), states[0], [sum(parts) for parts in zip(*grads, strict=True)])  # type: ignore[arg-type]


Way = Callable[..., Computed]


def assert_same(model: LanguageModel, ways: Iterable[Way], batch: Batch, state: Any = None) -> Any:
    """Compare ways with a pass over all tokens on a CPU, and return the state after."""
    expected = computed(model, batch, state)
    largest = max(float(grad.norm()) for grad in expected.grads)
    for way in ways:
        found = way(model, batch, state)
        assert error(found.loss, expected.loss) < 1e-10, way
        for (name, _), got, grad in zip(model.named_parameters(), found.grads, expected.grads, strict=True):
            # a gradient that is 0 in exact numbers, as of a gain that cancels, is only noise
            assert error(got, grad) < 1e-9 or float((got - grad).norm()) < 1e-12 * largest, (way, name)
        if model.constant_state:
            for got, want in zip(*map(state_tensors, (found.after, expected.after)), strict=True):
                assert not got.is_floating_point() or error(got, want) < 1e-9, way
    return expected.after if model.constant_state else None


def check(model: LanguageModel, *ways: Way) -> None:
    """Read three batches, each from the state after the one before. Some parts have no targets. Before the first batch,
    rows of downsampled layers have read texts of different lengths."""
    state = None
    if model.hourglass:
        with torch.no_grad():
            rows = zip(text([])[0], (4, 6), strict=True)
            state = concat_states([model(row[None, :count])[1] for row, count in rows])
    for starts, ignored, time in (
        (BORDERS, slice(3, 9), TOKENS),
        ([55], slice(TOKENS // 2), TOKENS),
        (None, slice(0), 37),
    ):
        tokens, targets, document_starts = text(starts or [], time=time)
        targets[:, ignored] = -100
        batch = (tokens, targets, None if starts is None else document_starts)
        state = assert_same(model, ways, batch, state)


SEGMENTS = [
    partial(computed, segment=50),
    partial(computed, segment=16, recompute=True),
]
ON_A_GPU = [
    partial(computed, policy=GPU_POLICY, recompute=True),
    partial(computed, policy=GPU_POLICY._replace(span_bytes=10**5)),
]
PARTS = [in_parts, partial(in_parts, size=2, policy=GPU_POLICY)]


@pytest.mark.parametrize("name", MODELS)
def test_every_way_has_the_gradients_of_the_whole(name: str) -> None:
    model = build(name)
    segments = SEGMENTS if model.constant_state else [partial(computed, recompute=True)]
    check(model, *segments, *ON_A_GPU, *([] if model.hourglass else PARTS))


@pytest.mark.parametrize("kind", KINDS)
def test_parts_may_be_shorter_than_a_convolution(kind: str) -> None:
    """A part of one token is read from the last inputs of several parts before it."""
    model, state = build(kind), None
    for time, starts in ((3, []), (4, [2, 3])):
        state = assert_same(model, [in_parts], text(starts, time=time), state)


@pytest.mark.slow
@pytest.mark.parametrize("size", [8, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_many_parts_are_one_text(kind: str, size: int) -> None:
    check(build(kind), partial(in_parts, size=size))


@pytest.mark.parametrize(("kind", "grows"), [("elu", False), ("ngram", False), ("softmax", True)])
def test_bytes_sent_do_not_depend_on_the_length(kind: str, grows: bool) -> None:
    model = build(kind)

    def sent(group: Threads, time: int) -> int:
        gradients_of(loss_of_part(model, *text([], time=time), None, group)[0], model)
        return group.bytes_sent

    short, long = (sum(in_threads(2, lambda group, time=time: sent(group, time))) for time in (100, 400))
    assert long > 3 * short if grows else long == short


@pytest.mark.parametrize("kind", ["elu", "delta"])
def test_segments_in_bfloat16_are_no_farther_from_the_truth_than_the_whole(kind: str) -> None:
    model = build(kind).float()
    model.set_state_dtype(torch.float32)
    truth, distances = computed(model, text(BORDERS)).grads, []
    for segment in (None, 64):
        with torch.autocast("cpu", torch.bfloat16):
            found = computed(model, text(BORDERS), segment=segment).grads
        off = [(got - exact).flatten() for got, exact in zip(found, truth, strict=True)]
        distances.append(float(torch.cat(off).norm()))
    assert distances[1] <= 1.1 * distances[0]


def test_dropout_is_drawn_again_in_the_backward_pass_of_a_segment() -> None:
    """In another order than in one pass, so a step along the gradient must lower the loss of the same draw."""
    model, losses = build("elu", dropout=0.2), []
    for _ in range(2):
        torch.manual_seed(1)
        loss, _, grads = computed(model, text([]), segment=64)
        losses.append(loss)
        with torch.no_grad():
            for weight, grad in zip(model.parameters(), grads, strict=True):
                weight -= 1e-5 * grad
    assert losses[1] < losses[0]


def test_segments_of_layers_whose_state_grows_are_refused() -> None:
    tokens = torch.zeros(1, 20, dtype=torch.long)
    with pytest.raises(UsageError, match=r"segment: the state of softmax attention grows .* Leave this out, or use"):
        text_loss(build("softmax"), tokens, tokens, segment=7)


PEAK = """
import resource, torch
from lmlong import recipe
from lmlong.model.language_model import LanguageModel
from lmlong.model.segments import text_loss
torch.set_num_threads(1)
model = LanguageModel(recipe.Model(width=64, layers=2, heads=2, attention=recipe.Attention(kind="linear")), 300)
for time in (1024, 10_240):
    tokens = torch.zeros(1, time, dtype=torch.long)
    nats, _ = text_loss(model, tokens, tokens, segment=512)
    nats.backward()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_is_that_of_a_segment() -> None:
    """In a process of its own, for the peak of this one is that of all tests before."""
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    short, long = (int(kilobytes) // 1024 for kilobytes in done.stdout.split())
    assert long - short < 40  # the activations of 9,216 more tokens would take more than a hundred megabytes


UNLIKE_OTHERS = ("channel", "favor", "delta", "sink", "window beside delta", "softmax", "ngram", "conv of blocks")


def test_a_gpu_reads_a_long_text_in_longer_pieces() -> None:
    model = LanguageModel(recipe.Model(width=16, layers=1, heads=2), 20)
    assert [model.piece(rows) for rows in (1, 100)] == [4096, 4096]
    use_policy(model, GPU_POLICY)
    assert [model.piece(rows) for rows in (1, 4, 100)] == [65536, 16384, 4096]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in UNLIKE_OTHERS else pytest.mark.slow) for name in MODELS]
)
def test_nothing_waits_for_a_value(name: str) -> None:
    """Tensors without values raise where a value is read, in training, in scoring, in a prompt and in a decode step."""
    layers = SHAPES[name].get("layers", len(SHAPES[name].get("attention", LINEAR).kind_names))
    model = build(name, policy=GPU_POLICY, layers=layers).float()
    model.use_kernel("torch")
    with FakeTensorMode(allow_non_fake_inputs=True):
        tokens, starts = torch.zeros(2, 70, dtype=torch.long), torch.zeros(2, 70, dtype=torch.bool)
        first, state = text_loss(model, tokens, tokens, starts)
        second, state = text_loss(model, tokens, tokens, starts, state)
        torch.autograd.grad(first + second, list(model.parameters()), allow_unused=True)
        text_nll(model, tokens, tokens, starts, state)
        with torch.inference_mode():
            _, state = model(tokens, None, starts)
            phase = None if model.hourglass is None else any_phase(model.hourglass.factor, 1)
            model.decode_step(tokens[:, 0], state, phase)


@needs_compiler
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", UNLIKE_OTHERS)
def test_compiled_blocks_have_the_same_gradients(name: str, recompute: bool) -> None:
    model = build(name)

    def compiled(*batch_and_state: object) -> object:
        torch._dynamo.reset()
        model.compile_blocks()
        return computed(*batch_and_state, policy=GPU_POLICY, recompute=recompute)  # type: ignore[arg-type]

    assert_same(model, [compiled], text([3, 70]))  # type: ignore[arg-type]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2  # of a block and of the loss
