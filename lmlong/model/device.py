"""The device of a model, and its memory."""

import platform
import re
import sys
from pathlib import Path

import torch
from torch import Tensor

from lmlong.errors import UsageError

WITHOUT_FLOAT64 = {"mps"}
"""Types of devices that have no float64: what needs it is computed on the CPU."""


def pick_device(wanted: str) -> torch.device:
    """Return the device that `auto`, `cpu`, `cuda` or `mps`, the GPU of a Mac, means on this machine."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        return torch.device(next(device for device, is_there in there.items() if is_there))
    if not there[wanted]:
        raise UsageError(f"device: {wanted} was asked for, but torch finds no GPU here. Use auto or cpu.")
    return torch.device(wanted)


def float64_device(device: torch.device) -> torch.device:
    """Return where float64 is computed with for a device: on it, or on the CPU."""
    return torch.device("cpu") if device.type in WITHOUT_FLOAT64 else device


def as_float64(x: Tensor) -> Tensor:
    """Return a tensor in float64, on the CPU where its device has none."""
    return x.to(float64_device(x.device)).double()


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def peak_memory(device: torch.device) -> int | None:
    """Return the peak memory so far in bytes: of the GPU, or of the process; None on Windows, which tells it in another
    way."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return None
    if (told := _peak_told_by_linux()) is not None:
        return told * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _peak_told_by_linux() -> int | None:
    """Return the peak in kibibytes; `getrusage` counts what the process that started this one had taken, too."""
    try:
        found = re.search(r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


def describe_machine(device: torch.device) -> str:
    """Return the name of the GPU, or of the processor with the number of threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "mps":
        return f"GPU of {_processor()}"
    threads = torch.get_num_threads()
    return f"{threads} thread{'' if threads == 1 else 's'} of {_processor()}"


def _processor() -> str:
    known = Path("/proc/cpuinfo")  # elsewhere `platform` is asked
    found = re.search(r"^model name\s*:\s*(.+)$", known.read_text(), re.MULTILINE) if known.exists() else None
    return found[1] if found else platform.processor() or platform.machine()
