"""`kernel: auto` on a CPU by the policy of a GPU: the kernels that are refused, the choice, and where it is stored."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from machine import needs_triton
from torch import Tensor

from lmlong import recipe
from lmlong.attention.base import CausalAttention
from lmlong.attention.delta.chunk import ChunkKernel as DeltaChunks
from lmlong.attention.device_policy import GPU_POLICY, policy_of, use_policy
from lmlong.attention.linear.chunk import ChunkKernel
from lmlong.attention.linear.triton import TritonLinear
from lmlong.attention.scan import Before, Span
from lmlong.model import kernel_choice, kernel_trial
from lmlong.model.kernel_choice import Decision, KernelChoice, choose_kernels, kernels_here
from lmlong.model.kernel_trial import BrokenDeviceError, TrialText, Work
from lmlong.model.language_model import LanguageModel

CPU = torch.device("cpu")
WORK = Work(2, 80, "32", trains=True)
SECONDS = {"torch": 0.031, "good": 0.0123, "bad": 0.001, "triton": 0.0123}


class Good(ChunkKernel):
    name = "good"


class GoodDelta(DeltaChunks):
    name = "good"


class BadDk(ChunkKernel):
    """A kernel with a small error in one gradient."""

    name = "bad"

    def backward(self, x: Span, dx: Span, state: Tensor, dstate: Tensor, dweights: list[Tensor]) -> Before:
        before = super().backward(x, dx, state, dstate, dweights)
        before.k.mul_(1.3)
        return before


class BadAtDocumentStarts(ChunkKernel):
    """A kernel that ignores document starts."""

    name = "bad"

    def forward(self, x: Span, state: Tensor) -> Tensor:
        return super().forward(x._replace(document_starts=None), state)


class Failing(ChunkKernel):
    name = "bad"

    def forward(self, x: Span, state: Tensor) -> Tensor:
        raise RuntimeError("no kernel image\nfor this device")


class NotANumber(ChunkKernel):
    name = "bad"

    def forward(self, x: Span, state: Tensor) -> Tensor:
        return super().forward(x, state).fill_(float("nan"))


class OutOfMemory(ChunkKernel):
    """A kernel that has enough memory for a short text only."""

    name = "bad"

    def forward(self, x: Span, state: Tensor) -> Tensor:
        if x.q.shape[2] != kernel_trial.SHORT:
            raise torch.OutOfMemoryError
        return super().forward(x, state)


class WrongTriton(TritonLinear):
    """The Triton kernels with an error in the gradient of keys."""

    def operation(self, features: Any, state: Tensor, x: Any) -> Any:
        k = x.k.clone()
        if k.requires_grad:
            k.register_hook(lambda dk: 1.02 * dk)
        return super().operation(features, state, x._replace(k=k))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LMLONG_CACHE", str(tmp_path))
    monkeypatch.setattr(kernel_choice, "policy_of", lambda device: GPU_POLICY)
    monkeypatch.setattr(kernel_trial, "median_seconds", seconds)
    return tmp_path / "kernels"


def model_of(*kernels: type, kind: Any = "linear", **options: Any) -> LanguageModel:
    torch.manual_seed(0)
    attention = recipe.Attention(kind=kind, **options)
    model = LanguageModel(recipe.Model(width=16, layers=2, heads=2, attention=attention), 20)
    for part in model.attention_parts:
        if part.kernels:
            mine = {"torch": part.kernels["torch"], **{kernel.name: kernel for kernel in kernels}}  # type: ignore[attr-defined]
            part.kernels = mine
    use_policy(model, GPU_POLICY)
    return model


def seconds(attention: CausalAttention, text: TrialText, work: Work) -> float:
    """Compute as a trial does, and return a fixed time."""
    assert attention.policy == GPU_POLICY
    kernel_trial.compute(attention, text, work)
    return SECONDS[attention.kernel_name]


def choose(model: LanguageModel, work: Work = WORK, known: KernelChoice | None = None) -> Decision:
    return choose_kernels(model, work, CPU, known)


def untried(model: LanguageModel, known: KernelChoice | None = None) -> Decision:
    decision = choose(model, known=known)
    assert not decision.tried
    return decision


@pytest.mark.parametrize("precision", ["32", "bf16"])
@pytest.mark.parametrize("trains", [True, False], ids=["trains", "reads"])
@pytest.mark.parametrize("decay", ["none", "learned", "channel"])
def test_the_fastest_kernel_that_agrees_is_chosen(precision: str, trains: bool, decay: str) -> None:
    decision = choose(model_of(Good, decay=decay), Work(2, 80, precision, trains))
    assert decision.line() == "kernel: linear by good (12.3 ms; torch 31 ms)"


@pytest.mark.parametrize(
    ("kernel", "precision", "refusal"),
    [
        (BadDk, "32", "disagrees: dk off by 3e-01"),
        (BadDk, "bf16", "disagrees: dk off by 3e-01"),
        (BadAtDocumentStarts, "32", r"disagrees: \w+ off by \S+"),
        (BadAtDocumentStarts, "bf16", r"disagrees: \w+ off by \S+"),
        (NotANumber, "32", "disagrees: S off by inf"),
        (Failing, "32", "fails: RuntimeError: no kernel image"),
        (OutOfMemory, "32", "needs more memory than there is"),
    ],
)
def test_a_wrong_kernel_is_refused_and_named(kernel: type, precision: str, refusal: str) -> None:
    decision = choose(model_of(kernel, Good), WORK._replace(precision=precision))
    assert decision.choice.names == {"linear": "good"}
    assert re.fullmatch(rf"kernel: linear by good \(12.3 ms; torch 31 ms; bad {refusal}\)", decision.line())


def test_a_kernel_that_hands_over_to_torch_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECONDS, "good", 0.0305)
    assert choose(model_of(Good)).line() == "kernel: linear by torch (31 ms; good 30.5 ms)"


def test_an_error_of_gradients_does_not_matter_to_a_reader() -> None:
    assert choose(model_of(BadDk), WORK._replace(trains=False)).choice.names == {"linear": "bad"}


@needs_triton
@pytest.mark.parametrize("precision", ["32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_fault_planted_in_triton_is_found(precision: str) -> None:
    work = Work(1, 70, precision, trains=True)
    assert choose(model_of(TritonLinear), work).choice.names == {"linear": "triton"}
    if precision == "32":  # in bf16 the error is as small as rounding
        line = choose(model_of(WrongTriton, decay="none"), work).line()
        assert line == "kernel: linear by torch (31 ms; triton disagrees: dk off by 2e-02)"


def test_each_kind_has_its_own_kernel() -> None:
    model = model_of(kind=["linear", "delta"])
    for part, kernel in zip(model.attention_parts, (Good, BadDk), strict=True):
        part.kernels = {"torch": part.kernels["torch"], kernel.name: kernel}
    model.attention_parts[1].kernels = {"torch": DeltaChunks, "good": GoodDelta, "bad": BadDk}
    decision = choose(model)
    assert decision.choice.names == {"linear": "good", "delta": "good"}
    model.use_kernels({"linear": "good", "delta": "torch"})
    assert [attention.kernel_name for attention in model.attentions] == ["good", "torch"]
    assert model.kernel_names == {"linear": "good", "delta": "torch"}


def test_a_recurrence_beside_a_window_has_a_kernel() -> None:
    model = model_of(Good, parallel_window=4)
    model.use_kernels(choose(model).choice.names)
    assert [part.kernel_name for part in model.attention_parts if part.kernels] == ["good", "good"]


def test_a_trial_changes_neither_the_model_nor_random_states() -> None:
    model = model_of(Good, feature_map="hedgehog")
    before, weights = torch.get_rng_state(), [x.clone() for x in model.parameters()]
    assert choose(model).choice.names == {"linear": "good"}
    assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, model.parameters(), weights)) and all(x.grad is None for x in model.parameters())
    assert {attention.kernel_name for attention in model.attentions} == {"native"}


def test_a_choice_is_in_the_cache(cache: Path) -> None:
    model = model_of(Good)
    first = choose(model)
    assert first.tried and untried(model).line() == first.line()
    for work in (WORK._replace(tokens=90), WORK._replace(precision="bf16"), WORK._replace(trains=False)):
        assert choose(model, work).tried
    assert choose(model_of(Good, decay="none")).tried and choose(model_of(Good, feature_map="relu")).tried
    assert len(list(cache.iterdir())) == 6


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", "[" * 10_000, "[]", '"good"']
    + [json.dumps({"kernel": name, "reason": why}) for name, why in (("os.system", "a"), (1, "a"), ("good", "\x1b"))]
    + ['{"kernel": "good"}', '{"kernel": "good", "reason": null}'],
)
def test_an_entry_that_is_not_valid_is_ignored(cache: Path, text: str) -> None:
    model = model_of(Good)
    choose(model)
    (file,) = cache.iterdir()
    file.write_text(text)
    assert choose(model).tried
    assert not choose(model).tried


def test_without_a_cache_kernels_are_tried_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LMLONG_CACHE", str(tmp_path / "file"))
    for _ in range(2):
        decision = choose(model_of(Good))
        assert decision.tried and decision.choice.names == {"linear": "good"}


def test_the_choice_of_a_checkpoint_is_kept(cache: Path) -> None:
    model = model_of(Good)
    choice = choose(model).choice
    slower = choice._replace(names={"linear": "torch"})
    kept = untried(model, slower)
    assert kept.choice == slower and kept.line(slower) == "kernel: linear by torch (as in the checkpoint)"
    for known in (choice._replace(names={"linear": "removed"}), slower._replace(chosen_by="another GPU")):
        decision = choose(model, known=known)
        assert decision.choice == choice
        old = known.names["linear"]
        assert decision.line(known).endswith(f"; the checkpoint has linear by {old} ({known.chosen_by})")


def test_a_choice_that_is_not_valid_is_not_read() -> None:
    choice = KernelChoice({"linear": "torch"}, "a GPU")
    assert KernelChoice.read(json.loads(json.dumps(choice._asdict()))) == choice
    values: list[Any] = [None, [], {}, {"names": {}}, {"names": [], "chosen_by": ""}, {"names": {}, "chosen_by": 1}]
    values += [{"names": {"linear": 1}, "chosen_by": ""}, {"names": {}, "chosen_by": "\x1b[2J"}]
    assert all(KernelChoice.read(value) is None for value in values)


def test_on_a_cpu_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "policy_of", policy_of)
    model = model_of(Good)
    model.use_kernels({"linear": "native"})
    decision = untried(model)
    assert decision.choice.names == model.kernel_names and not decision.line()
    known = KernelChoice({"linear": "triton"}, "a GPU")
    assert (
        decision.line(known)
        == f"kernel: linear by {model.kernel_names['linear']}; the checkpoint has linear by triton (a GPU)"
    )


def test_a_kernel_set_by_name_is_kept() -> None:
    model = model_of(Good)
    model.use_kernel("torch")
    decision = untried(model)
    assert decision.choice.names == {"linear": "torch"} and not decision.line()


def test_a_single_kernel_is_not_tried() -> None:
    assert untried(model_of()).line() == "kernel: linear by torch (no other kernel can be used here)"
    assert not untried(model_of(kind="softmax")).line()


def test_kernels_here_are_those_that_would_be_chosen() -> None:
    model = model_of(Good)
    assert kernels_here(model, WORK, CPU) == {"linear": None}
    choose(model)
    assert kernels_here(model, WORK, CPU) == {"linear": "good"}


def test_a_kernel_that_breaks_the_device_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: torch.device, kernel: str, failure: Exception) -> None:
        raise BrokenDeviceError(kernel, failure)

    monkeypatch.setattr(kernel_trial, "_check_device", broken)
    model = model_of(Failing)
    with pytest.raises(BrokenDeviceError, match=r"bad has made the GPU unusable .*no kernel image.* Run the command"):
        choose(model)
    decision = untried(model)
    assert decision.choice.names == {"linear": "torch"} and "no kernel image" in decision.line()
