"""A loss, its gradients and the state after it are the same in segments, with activations recomputed, by the policy of
a GPU, and in parts that several processes read, which here are threads of one process."""

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any, NamedTuple

import pytest
import torch
from grids import thinned
from model.parts import KINDS, TOKENS, build, text
from models import LIKE_LLAMA, stirred
from torch import Tensor

from lmlong import recipe
from lmlong.attention.device_policy import CPU_POLICY, GPU_POLICY, DevicePolicy, use_policy
from lmlong.attention.laws import error
from lmlong.errors import UsageError
from lmlong.model.language_model import LanguageModel
from lmlong.model.segments import loss_of_part, text_loss
from lmlong.model.sequence_group import SequenceGroup
from lmlong.model.state import concat_states, detach_state, state_tensors

Batch = tuple[Tensor, Tensor, Tensor | None]

BORDERS = [0, 7, 49, 50, 51, 74, 75, 76, TOKENS - 2]
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


def assert_same(model: LanguageModel, way: Way, batch: Batch, state: Any = None) -> Any:
    """Compare a way with a pass over all tokens on a CPU, and return the state after."""
    expected, found = computed(model, batch, state), way(model, batch, state)
    assert error(found.loss, expected.loss) < 1e-10
    largest = max(float(grad.norm()) for grad in expected.grads)
    for (name, _), got, grad in zip(model.named_parameters(), found.grads, expected.grads, strict=True):
        # a gradient that is 0 in exact numbers, as of a gain that cancels, is only noise
        assert error(got, grad) < 1e-9 or float((got - grad).norm()) < 1e-12 * largest, name
    if not model.constant_state:
        return None
    for got, want in zip(*map(state_tensors, (found.after, expected.after)), strict=True):
        assert not got.is_floating_point() or error(got, want) < 1e-9
    return expected.after


def check(model: LanguageModel, way: Way) -> None:
    """Read two batches, the second from the state after the first."""
    tokens, targets, starts = text(BORDERS)
    targets[1, 3:9] = -100
    state = assert_same(model, way, (tokens, targets, starts))
    assert_same(model, way, text([55]), state)


every_kind = pytest.mark.parametrize("kind", KINDS)
CONSTANT = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "softmax"])


@thinned(
    CONSTANT,
    pytest.mark.parametrize("segment", [16, 50, 149]),
    pytest.mark.parametrize("recompute", [False, True], ids=["", "recomputed"]),
)
def test_segments_have_the_gradients_of_the_whole(kind: str, segment: int, recompute: bool) -> None:
    check(build(kind), partial(computed, segment=segment, recompute=recompute))


@thinned(
    every_kind,
    pytest.mark.parametrize("span_bytes", [GPU_POLICY.span_bytes, 10**5], ids=["", "short spans"]),
    pytest.mark.parametrize("recompute", [False, True], ids=["", "recomputed"]),
)
def test_the_policy_of_a_gpu_has_the_gradients_of_a_cpu(kind: str, span_bytes: int | None, recompute: bool) -> None:
    check(build(kind), partial(computed, policy=GPU_POLICY._replace(span_bytes=span_bytes), recompute=recompute))


PARTS = {"three by a CPU": partial(in_parts), "two by a GPU's policy": partial(in_parts, size=2, policy=GPU_POLICY)}


@thinned(every_kind, pytest.mark.parametrize("way", PARTS.values(), ids=PARTS))
def test_parts_of_rows_have_the_gradients_of_the_whole(kind: str, way: Way) -> None:
    check(build(kind), way)


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"shared keys, {kind}": (kind, {**LIKE_LLAMA, "kv_heads": 1}) for kind in ("linear", "window", "softmax")},
    "added heads": ("linear", {"add_ngram": [1]}),
    "no convolution": ("linear", {"convolution": 0}),
    "rotary": ("linear", {"positions": "rotary"}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_model_has_the_gradients_of_the_whole(shape: str) -> None:
    kind, options = SHAPES[shape]
    model = build(kind, **options)
    for way in (partial(computed, recompute=True), in_parts, *([partial(computed, segment=50)] * model.constant_state)):
        assert_same(model, way, text(BORDERS))


@thinned(every_kind, pytest.mark.parametrize("time", [3, 4]))
def test_parts_may_be_shorter_than_a_convolution(kind: str, time: int) -> None:
    """A part of one token is read from the last inputs of several parts before it."""
    model = build(kind)
    assert_same(model, in_parts, text([], time=time))
    state = computed(model, text([7], time=9)).after if model.constant_state else None
    assert_same(model, in_parts, text([time - 2, time - 1], time=time), state)


@pytest.mark.slow
@pytest.mark.parametrize("size", [8, 64])
@every_kind
def test_many_parts_are_one_text(kind: str, size: int) -> None:
    check(build(kind), partial(in_parts, size=size))


def test_a_part_without_targets_has_a_loss_of_0() -> None:
    tokens, targets, starts = text([])
    targets[:, : TOKENS // 2] = -100
    assert_same(build("linear"), partial(in_parts, size=2), (tokens, targets, starts))


@pytest.mark.parametrize(("kind", "grows"), [("linear", False), ("ngram", False), ("softmax", True)])
def test_bytes_sent_do_not_depend_on_the_length(kind: str, grows: bool) -> None:
    model = build(kind)

    def sent(group: Threads, time: int) -> int:
        gradients_of(loss_of_part(model, *text([], time=time), None, group)[0], model)
        return group.bytes_sent

    short, long = (sum(in_threads(2, lambda group, time=time: sent(group, time))) for time in (100, 400))
    assert long > 3 * short if grows else long == short


@thinned(
    pytest.mark.parametrize("kind", ["linear", "window"]),
    pytest.mark.parametrize(
        "cut", [recipe.Downsample(factor=4, kind="conv"), recipe.Downsample(factor=3, kind="max")], ids=str
    ),
    pytest.mark.parametrize("segment", [16, 50]),
)
def test_a_half_filled_block_passes_its_gradient_to_the_segment_before(
    kind: str, cut: recipe.Downsample, segment: int
) -> None:
    model = build(kind, layers=3, downsample=cut)
    for recompute in (False, True):
        assert_same(model, partial(computed, segment=segment, recompute=recompute), text([1, 17, 60]))


@thinned(
    pytest.mark.parametrize("starts", [None, [0, 9, 28], [35], [*range(3, 36)]], ids=["none", "few", "late", "many"]),
    pytest.mark.parametrize(("kind", "factor"), [("linear", 3), ("window", 4), ("delta", 4), ("softmax", 5)]),
)
def test_downsampled_layers_need_no_values_on_a_gpu(kind: str, factor: int, starts: list[int] | None) -> None:
    """The loss of texts that continue texts of different lengths, that of the tokens after them, and all gradients."""
    model = build(kind, layers=4, downsample=recipe.Downsample(factor=factor, layers=2))
    tokens = torch.randint(20, (3, 80), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = concat_states([model(row[None, :count])[1] for row, count in zip(tokens, (4, 6, 12), strict=True)])
    document_starts = None if starts is None else torch.zeros(3, 36, dtype=torch.bool)
    if document_starts is not None:
        document_starts[0, starts] = True
    found = []
    for policy in (CPU_POLICY, GPU_POLICY._replace(block_sparse=False)):
        use_policy(model, policy)
        first, state = text_loss(model, tokens[:, :36], tokens[:, 1:37], document_starts, before)
        more, state = text_loss(model, tokens[:, 36:43], tokens[:, 37:44], None, state)
        last, _ = text_loss(model, tokens[:, 43:79], tokens[:, 44:80], document_starts, state)
        found.append([first, more, last, *gradients_of(first + more + last, model)])
    for expected, got in zip(*found, strict=True):
        assert error(got, expected) < 1e-9


@pytest.mark.parametrize("kind", ["linear", "delta"])
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
    model, losses = build("linear", dropout=0.2), []
    for _ in range(2):
        torch.manual_seed(1)
        loss, _, grads = computed(model, text([]), segment=64)
        losses.append(loss)
        with torch.no_grad():
            for weight, grad in zip(model.parameters(), grads, strict=True):
                weight -= 1e-5 * grad
    assert losses[1] < losses[0]


def test_segments_of_layers_whose_state_grows_are_refused() -> None:
    options = recipe.Model(width=16, layers=2, heads=2, attention=recipe.Attention(kind=["linear", "softmax"]))
    tokens = torch.zeros(1, 20, dtype=torch.long)
    with pytest.raises(UsageError, match=r"segment: the state of softmax attention grows .* Leave this out, or use"):
        text_loss(stirred(LanguageModel(options, 40)), tokens, tokens, segment=7)


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
