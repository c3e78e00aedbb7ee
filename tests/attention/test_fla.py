"""What flash-linear-attention computes; test_scans.py compares its kernels with others."""

import re
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from lmlong.attention import fla as fla_kernels
from lmlong.attention.delta.layer import DeltaAttention
from lmlong.attention.delta.naive import Silu
from lmlong.attention.feature_maps import Elu
from lmlong.attention.fla import MAX_WIDTH
from lmlong.attention.linear.layer import LinearAttention

if not (find_spec("fla") and find_spec("triton")):
    pytest.skip("flash-linear-attention is not installed", allow_module_level=True)

import triton


@pytest.mark.parametrize(
    ("dtype", "sums", "width", "computes"),
    [
        (torch.bfloat16, torch.float32, MAX_WIDTH, True),
        (torch.bfloat16, torch.float32, MAX_WIDTH + 2, False),
        (torch.bfloat16, torch.float64, 8, False),
        (torch.float16, torch.float32, 8, False),
        (torch.float32, torch.float32, 8, False),
        (torch.float64, torch.float64, 8, False),
    ],
)
def test_what_is_left_to_torch(dtype: torch.dtype, sums: torch.dtype, width: int, computes: bool) -> None:
    assert fla_kernels.computes(torch.zeros(1, 1, 1, width, dtype=dtype), torch.zeros(1, dtype=sums)) == computes


def linear(decay: str, values: int = 16) -> LinearAttention:
    return LinearAttention(2, 16, values, Elu(16), decay)


DELTA = DeltaAttention(2, 16, 16, Silu(16))


@pytest.mark.parametrize(
    ("attention", "device", "capability", "of_triton", "of_fla", "reason"),
    [
        (DELTA, "cuda", 8, "3.6.0", "0.6.0", None),
        (DELTA, "cuda", 9, "3.7.1+git12", "0.6.0", None),
        (DELTA, "cuda", 9, "3.6.0", "0.6.0", r"gradients on this GPU need Triton 3\.7\.1"),
        (DELTA, "cuda", 8, "3.7.1", "0.5.1", r"fla-core 0\.5\.1 is too old"),
        (DELTA, "cpu", 8, "3.7.1", "0.6.0", "needs an NVIDIA GPU, and the device is cpu"),
        (linear("channel"), "cpu", 8, "3.7.1", "0.6.0", "needs an NVIDIA GPU, and the device is cpu"),
        (linear("channel"), "cuda", 9, "3.6.0", "0.6.0", None),
        (linear("channel", 5), "cuda", 8, "3.7.1", "0.6.0", "an even number of values up to 256, and a head has 5"),
        (linear("learned"), "cuda", 8, "3.7.1", "0.6.0", "decay: channel"),
    ],
)
def test_why_it_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch,
    attention: Any,
    device: str,
    capability: int,
    of_triton: str,
    of_fla: str,
    reason: str | None,
) -> None:
    """On an H100 the delta rule needs a Triton that compiles its gradients correctly."""
    monkeypatch.setattr(fla_kernels, "version", lambda package: of_fla)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    monkeypatch.setattr(triton, "__version__", of_triton)
    why = attention.kernels["fla"].unavailable_reason(attention, torch.device(device))
    assert why is None if reason is None else re.search(reason, why)
