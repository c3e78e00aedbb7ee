"""The number format of a forward pass: float32, or torch.autocast to bfloat16 or float16."""

from typing import Literal

import torch

from lmlong.errors import UsageError
from lmlong.native.prebuilt import processor_features

Precision = Literal["32", "bf16", "16"]

DTYPES: dict[str, torch.dtype] = {"32": torch.float32, "bf16": torch.bfloat16, "16": torch.float16}


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return a context in which a forward pass computes in `precision`; an unknown format means float32."""
    dtype = DTYPES.get(precision, torch.float32)
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def computes_in_bf16(device: torch.device) -> bool:
    """Return whether the device has hardware for bfloat16 matrix products."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "mps":
        return False
    return bool(processor_features() & {"avx512_bf16", "amx_bf16"})


def evaluation_precision(chosen: Precision | None, trained_in: str, device: torch.device) -> Precision:
    """Return the format to evaluate a model in: the `chosen` format, or if None the format it was trained in. It is
    float32 if the device only emulates that format, or if the recipe sets none, as for an imported model."""
    if chosen == "16" and device.type != "cuda":
        raise UsageError("precision: 16 needs a GPU. Use bf16 or 32.")
    if chosen == "bf16" and device.type == "mps":
        raise UsageError("precision: bf16 is not offered on mps. Use 32.")
    if chosen is not None:
        return chosen
    if trained_in == "bf16" and computes_in_bf16(device):
        return "bf16"
    return "16" if trained_in == "16" and device.type == "cuda" else "32"
