"""`kernel: auto`: kernels that are not native are compared with torch before they are used, here planted ones."""

import re
from typing import Any

import pytest
import torch
from grids import thinned
from torch import Tensor
from wrong_kernel import WrongDk

from lmlong import recipe
from lmlong.attention.device_policy import GPU_POLICY, use_policy
from lmlong.attention.linear.chunk import ChunkKernel
from lmlong.attention.scan import Span
from lmlong.model.kernel_check import checked_kernels
from lmlong.model.language_model import LanguageModel

CPU = torch.device("cpu")


class Good(ChunkKernel):
    name = "good"


class WrongAtDocumentStarts(ChunkKernel):
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


def model_of(kernel: type[ChunkKernel], **options: Any) -> LanguageModel:
    """Return a model by the policy of a GPU, with a kernel beside torch's."""
    attention = recipe.Attention(kind="linear", **options)
    torch.manual_seed(0)
    model = LanguageModel(recipe.Model(width=16, layers=2, heads=2, attention=attention), 20)
    for part in model.attention_parts:
        if part.kernels:
            part.kernels = {"torch": ChunkKernel, kernel.name: kernel}
    use_policy(model, GPU_POLICY)
    return model


@thinned(
    pytest.mark.parametrize("precision", ["32", "bf16"]),
    pytest.mark.parametrize("trains", [True, False], ids=["trains", "reads"]),
    pytest.mark.parametrize("decay", ["none", "learned", "channel"]),
)
def test_a_kernel_that_agrees_is_used(precision: str, trains: bool, decay: str) -> None:
    model = model_of(Good, decay=decay, parallel_window=4)
    before, weights = torch.get_rng_state(), [x.clone() for x in model.parameters()]
    assert checked_kernels(model, precision, trains, CPU) == ({"linear": "good"}, [])
    assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, model.parameters(), weights)) and all(x.grad is None for x in model.parameters())


@pytest.mark.parametrize(
    ("kernel", "precision", "why"),
    [
        (WrongDk, "32", "differs: dk is off by 2e-02"),
        (WrongAtDocumentStarts, "32", r"differs: \w+ is off by \S+"),
        (WrongAtDocumentStarts, "bf16", r"differs: \w+ is off by \S+"),
        (NotANumber, "32", "differs: S is off by inf"),
        (Failing, "32", "fails: RuntimeError: no kernel image for this device"),
    ],
)
def test_a_wrong_kernel_is_replaced_by_torch(kernel: type[ChunkKernel], precision: str, why: str) -> None:
    names, (line,) = checked_kernels(model_of(kernel), precision, True, CPU)
    assert names == {"linear": "torch"}
    assert re.fullmatch(f"kernel: linear is computed by torch, since bad {why}", line)


def test_an_error_of_gradients_does_not_matter_to_a_reader() -> None:
    assert checked_kernels(model_of(WrongDk), "32", False, CPU) == ({"linear": "bad"}, [])


def test_a_kernel_set_by_name_is_kept() -> None:
    model = model_of(Failing)
    model.use_kernel("bad")
    assert checked_kernels(model, "32", True, CPU) == ({"linear": "bad"}, [])
