"""The device of a model, and its memory."""

import platform
import re
import sys
from pathlib import Path

import torch

from lmlong.errors import UsageError


def pick_device(wanted: str) -> torch.device:
    """Return the device that `auto`, `cpu` or `cuda` means on this machine."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UsageError("device: cuda was asked for, but torch finds no GPU here. Use auto or cpu.")
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(wanted)


def peak_memory(device: torch.device) -> int | None:
    """Return the peak memory so far in bytes: of the GPU, or of the process; None on Windows, which tells it in another
    way."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def describe_machine(device: torch.device) -> str:
    """Return the name of the GPU, or of the processor with the number of threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{threads} thread{'' if threads == 1 else 's'} of {_processor()}"


def _processor() -> str:
    known = Path("/proc/cpuinfo")  # elsewhere `platform` is asked
    found = re.search(r"^model name\s*:\s*(.+)$", known.read_text(), re.MULTILINE) if known.exists() else None
    return found[1] if found else platform.processor() or platform.machine()
