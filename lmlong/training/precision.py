"""The number format of a run: what the recipe asks for, or the fastest this machine computes in."""

from typing import Literal

import torch

from lmlong.errors import UsageError

Format = Literal["32", "bf16", "16"]

LIGHTNING = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}


def resolve(wanted: Literal["auto", "32", "bf16", "16"], device: torch.device) -> Format:
    """bf16 for `auto` where the machine multiplies in it rather than imitating it."""
    if wanted == "16" and device.type == "cpu":
        raise UsageError("training.precision: 16 needs a GPU. Use bf16, 32 or auto.")
    if wanted != "auto":
        return wanted
    return "bf16" if computes_in_bf16(device) else "32"


def computes_in_bf16(device: torch.device) -> bool:
    """Whether products of bfloat16 matrices run on hardware made for them."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    # private, but torch offers no public question of this kind for a CPU
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
