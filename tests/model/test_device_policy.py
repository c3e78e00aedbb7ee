"""A model computes the same by the policy of a GPU as by the policy of a CPU."""

import pytest
import torch
from machine import needs_compiler
from models import kinds, stirred
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lmlong import recipe
from lmlong.attention import laws
from lmlong.attention.device_policy import CPU_POLICY, GPU_POLICY, DevicePolicy, use_policy
from lmlong.model.language_model import LanguageModel
from lmlong.model.metrics import text_nll
from lmlong.model.segments import text_loss
from lmlong.model.state import concat_states
from lmlong.model.stretch import any_phase

VOCABULARY, TOKENS = 50, 700

KINDS = kinds(window=70)


def by_policy(model: LanguageModel, policy: DevicePolicy, starts: Tensor | None) -> dict[str, Tensor]:
    """Return the loss of a text, that of each target, the state after, and all gradients."""
    tokens = torch.randint(VOCABULARY, (2, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    text, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, 5:9] = -100
    use_policy(model, policy)
    loss, state = text_loss(model, text, targets, starts)
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    nll, _ = text_nll(model, text, targets, starts)
    named = {name: grad for (name, _), grad in zip(model.named_parameters(), grads, strict=True) if grad is not None}
    states = {f"state {n}": x for n, x in enumerate(laws.state_tensors(state)) if x.is_floating_point()}
    return {"loss": loss.detach(), "of each": nll, **states, **named}


def build(kind: str, checkpointing: bool = False, **shape: object) -> LanguageModel:
    torch.manual_seed(0)
    attention = recipe.Attention(**KINDS[kind])  # type: ignore[arg-type]
    options = recipe.Model(**{"width": 32, "layers": 2, "heads": 2, "attention": attention, **shape})  # type: ignore[arg-type]
    model = LanguageModel(options, VOCABULARY, checkpointing).double()
    model.use_kernel("torch")
    model.set_state_dtype(torch.float64)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return model


def starting_at(starts: list[int]) -> Tensor:
    """Return the starts of documents in the first of two rows."""
    document_starts = torch.zeros(2, TOKENS, dtype=torch.bool)
    document_starts[0, starts] = True
    return document_starts


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        assert laws.error(got[name], value) < 1e-9, name


@pytest.mark.parametrize("starts", [None, [0, 9, 28], [35], [*range(3, 36)]], ids=["none", "few", "late", "many"])
@pytest.mark.parametrize(("kind", "factor"), [("linear", 3), ("window", 4), ("delta", 4), ("softmax", 5)])
def test_layers_that_read_blocks_need_no_values(kind: str, factor: int, starts: list[int] | None) -> None:
    """The loss of texts that continue texts of different lengths, that of the tokens after them, and all gradients."""
    options = recipe.Attention(**{**KINDS[kind], "window": 4})  # type: ignore[arg-type]
    cut = recipe.Downsample(factor=factor, layers=2)
    model = stirred(
        LanguageModel(recipe.Model(width=16, layers=4, heads=2, attention=options, downsample=cut), 20), 0.3
    )
    model.double().set_state_dtype(torch.float64)
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(20, (3, 80), generator=draw)
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
        grads = torch.autograd.grad(first + more + last, list(model.parameters()))
        found.append([first, more, last, *grads])
    for expected, got in zip(*found, strict=True):
        assert laws.error(got, expected) < 1e-9


def test_a_gpu_reads_a_long_text_in_longer_pieces() -> None:
    model = LanguageModel(recipe.Model(width=16, layers=1, heads=2), 20)
    assert [model.piece(rows) for rows in (1, 100)] == [4096, 4096]
    use_policy(model, GPU_POLICY)
    assert [model.piece(rows) for rows in (1, 4, 100)] == [65536, 16384, 4096]


@pytest.mark.parametrize(
    "with_starts", [pytest.param(False, marks=pytest.mark.slow), True], ids=["one document", "documents"]
)
@pytest.mark.parametrize("kind", [*KINDS, "downsampled"])
def test_nothing_waits_for_a_value(kind: str, with_starts: bool) -> None:
    """Tensors without values raise where a value is read, in training, in scoring, in a prompt and in a decode step."""
    cut = {"downsample": recipe.Downsample(factor=3)} if kind == "downsampled" else {}
    attention = recipe.Attention(**KINDS[kind if kind in KINDS else "linear"])  # type: ignore[arg-type]
    layers = 3 if cut else 1
    options = recipe.Model(width=32, layers=layers, heads=2, attention=attention, **cut)  # type: ignore[arg-type]
    model = LanguageModel(options, VOCABULARY)
    model.use_kernel("torch")
    use_policy(model, GPU_POLICY)
    with FakeTensorMode(allow_non_fake_inputs=True):
        text = torch.zeros(2, 100, dtype=torch.long)
        starts = torch.zeros(2, 100, dtype=torch.bool) if with_starts else None
        first, state = text_loss(model, text, text, starts)
        second, state = text_loss(model, text, text, starts, state)
        torch.autograd.grad(first + second, list(model.parameters()), allow_unused=True)
        text_nll(model, text, text, starts, state)
        with torch.inference_mode():
            _, state = model(text, None, starts)
            phase = None if model.hourglass is None else any_phase(3, 1)
            model.decode_step(text[:, 0], state, phase)


@pytest.mark.parametrize("starts", [None, [0, 64, 65, 300]], ids=["one document", "documents"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_policy_of_a_gpu_gives_the_same(kind: str, starts: list[int] | None) -> None:
    model, document_starts = build(kind), None if starts is None else starting_at(starts)
    expected, got = (by_policy(model, policy, document_starts) for policy in (CPU_POLICY, GPU_POLICY))
    assert_same(got, expected)


@pytest.mark.parametrize("kind", ["linear", "favor", "delta"])
def test_spans_and_feature_maps_are_divided_if_memory_is_short(kind: str) -> None:
    model, document_starts = build(kind), starting_at([64, 300])
    expected, got = (by_policy(model, GPU_POLICY._replace(span_bytes=most), document_starts) for most in (10**9, 10**5))
    assert_same(got, expected)


@pytest.mark.parametrize("kind", ["softmax", "window"])
def test_lists_of_blocks_in_a_model_that_recomputes_activations(kind: str) -> None:
    shape, document_starts = {"kv_heads": 1}, starting_at([3, 300])
    expected = by_policy(build(kind, **shape), CPU_POLICY, document_starts)
    assert_same(by_policy(build(kind, checkpointing=True, **shape), GPU_POLICY, document_starts), expected)


@needs_compiler
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kind", [*KINDS, "downsampled"])
def test_compiled_blocks_give_the_same(kind: str, checkpointing: bool) -> None:
    shape = {"layers": 3, "downsample": recipe.Downsample(factor=3)} if kind == "downsampled" else {}
    kind, document_starts = kind if kind in KINDS else "linear", starting_at([3, 300])
    expected = by_policy(build(kind, **shape), CPU_POLICY, document_starts)
    torch._dynamo.reset()
    model = build(kind, checkpointing, **shape)
    model.compile_blocks()
    assert_same(by_policy(model, GPU_POLICY, document_starts), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2  # of a block and of the loss
