"""Devices: which one is taken, and that one without float64 is never asked for it."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lmlong.errors import UsageError
from lmlong.inference.sampling import Sampler, Sampling, sample
from lmlong.model import device as devices
from lmlong.model.device import pick_device, processor_is_faster_in_bf16
from lmlong.model.language_model import LanguageModel
from lmlong.model.metrics import loss_totals
from lmlong.model.segments import text_loss
from lmlong.recipe import Attention, Favor, Model
from lmlong.training.prepare import resolve

META = torch.device("meta")


class NoFloat64(TorchDispatchMode):
    """The meta device as one that has no float64, and whose tensors can be copied to the CPU, as zeros."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        from_meta = any(isinstance(x, torch.Tensor) and x.device == META for x in tree_leaves(args))
        if function is torch.ops.aten._local_scalar_dense.default and from_meta:
            return 1
        if function is torch.ops.aten._to_copy.default and from_meta and kwargs.get("device") == torch.device("cpu"):
            dtype = kwargs.get("dtype") or args[0].dtype
            assert dtype == args[0].dtype, "converted on the way"
            return torch.zeros(args[0].shape, dtype=dtype, device="cpu")
        if function is torch.ops.aten.nonzero.default and from_meta:
            return torch.zeros(args[0].numel(), args[0].dim(), dtype=torch.long, device=META)
        if function is torch.ops.aten.index.Tensor and from_meta:
            args = (args[0], [index for given in args[1] for index in all_of(given)])
        result = function(*args, **kwargs)
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.device == META:
                assert x.dtype != torch.float64, f"{function} in float64"
        return result


def all_of(index: Any) -> list[Any]:
    """A mask as the indices of all places, since on the meta device nobody knows where it is true."""
    if index is None or index.dtype != torch.bool:
        return [index]
    return [torch.zeros(index.numel(), dtype=torch.long, device=META) for _ in index.shape]


def step(options: Model) -> None:
    """Train, score and sample a token on the device without float64."""
    model = LanguageModel(options, 50).to(META)
    tokens = torch.zeros(2, 40, dtype=torch.long, device=META)
    starts = torch.zeros(2, 40, dtype=torch.bool, device=META)
    nll, _ = text_loss(model, tokens, tokens, starts)
    nll.backward()
    with torch.no_grad():
        loss_totals(model, [(tokens, tokens, starts)], torch.ones(50, dtype=torch.long, device=META))
        logits, _ = model.step(tokens[:, 0], model.init_state(2))
    sample([Sampler(Sampling(top_p=0.9), (row,)) for row in range(2)], logits.nan_to_num())


ATTENTIONS = {
    "linear": Attention(kind="linear"),
    "favor": Attention(kind="linear", feature_map="favor", favor=Favor(features=8)),
    "window": Attention(kind="window", window=8),
    "softmax": Attention(kind="softmax"),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_device_without_float64_is_never_asked_for_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "WITHOUT_FLOAT64", {"meta"})
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # the meta device has none
    with NoFloat64():
        step(Model(width=16, layers=2, heads=2, attention=ATTENTIONS[name]))


def test_the_stand_in_refuses_float64() -> None:
    with pytest.raises(AssertionError, match="in float64"), NoFloat64():
        step(Model(width=16, layers=2, heads=2, attention=ATTENTIONS["softmax"]))


def test_auto_takes_the_gpu_of_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for is_there, taken in ((True, "mps"), (False, "cpu")):
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda is_there=is_there: is_there)
        assert pick_device("auto").type == taken
    with pytest.raises(UsageError, match="device: mps was asked for, but torch finds no GPU here"):
        pick_device("mps")


def test_a_mac_trains_in_float32() -> None:
    mps = torch.device("mps")
    assert resolve("auto", mps) == resolve("32", mps) == "32"
    with pytest.raises(UsageError, match="precision: bf16 is not offered on mps"):
        resolve("bf16", mps)


@pytest.mark.parametrize(
    ("features", "vendor", "is_faster"),
    [
        ({"avx512_bf16", "amx_bf16"}, "GenuineIntel", True),
        ({"avx512_bf16"}, "GenuineIntel", False),  # a virtual machine that hides AMX
        ({"avx512_bf16"}, "AuthenticAMD", True),
        ({"avx512f"}, "AuthenticAMD", False),
        ({"asimd"}, None, False),
    ],
)
def test_processor_trains_in_its_faster_format(features: set[str], vendor: str | None, is_faster: bool) -> None:
    assert processor_is_faster_in_bf16(features, vendor) is is_faster
