"""Where a model runs."""

import torch

from lmlong.errors import UsageError


def pick_device(wanted: str) -> torch.device:
    """The device that `auto`, `cpu` or `cuda` stands for on this machine."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UsageError("device: cuda was asked for, but torch finds no GPU here. Use auto or cpu.")
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(wanted)
