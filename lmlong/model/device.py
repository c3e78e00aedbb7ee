"""Where a model runs."""

import sys

import torch

from lmlong.errors import UsageError


def pick_device(wanted: str) -> torch.device:
    """The device that `auto`, `cpu` or `cuda` stands for on this machine."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UsageError("device: cuda was asked for, but torch finds no GPU here. Use auto or cpu.")
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(wanted)


def peak_memory(device: torch.device) -> int:
    """The most bytes held so far: of the GPU, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # which only Unix has

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
