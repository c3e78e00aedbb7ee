"""The device of a model, its memory, and the number format of a forward pass: float32, or torch.autocast to bfloat16 or
float16."""

import ctypes
import platform
import re
import sys
from collections.abc import Set
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from lmlong.errors import UsageError
from lmlong.native.prebuilt import processor_features

Precision = Literal["32", "bf16", "16"]

DTYPES: dict[str, torch.dtype] = {"32": torch.float32, "bf16": torch.bfloat16, "16": torch.float16}

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}
"""Operations a second in bfloat16 with float32 sums, without sparsity, by part of a GPU's name, as NVIDIA states
them."""

WITHOUT_FLOAT64 = {"mps"}
"""Device types without float64. Computations that need it run on the CPU."""


def pick_device(name: str) -> torch.device:
    """Return the device for `auto`, `cpu`, `cuda` or `mps` (the GPU of a Mac)."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(device for device in available if available[device])
    if not available[name]:
        raise UsageError(f"device: {name} was asked for, but torch finds no GPU here. Use auto or cpu.")
    return torch.device(name)


def float64_device(device: torch.device) -> torch.device:
    """Return the device itself, or the CPU if the device has no float64."""
    return torch.device("cpu") if device.type in WITHOUT_FLOAT64 else device


def as_float64(x: Tensor) -> Tensor:
    """Return a tensor in float64, on the CPU if its device has no float64."""
    return (x.cpu() if x.device.type in WITHOUT_FLOAT64 else x).double()  # not at once: it may convert before it copies


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


def is_faster_in_bf16(device: torch.device) -> bool:
    """Return whether the device not only computes in bfloat16, but multiplies matrices faster than in float32."""
    if device.type != "cpu":
        return computes_in_bf16(device)
    return processor_is_faster_in_bf16(processor_features(), _proc_field("/proc/cpuinfo", r"^vendor_id\s*:\s*(.+)$"))


def processor_is_faster_in_bf16(features: Set[str], vendor: str | None) -> bool:
    """Return whether a processor is. The instructions of AVX-512 for bfloat16 have three times the speed of float32 on
    AMD's processors, and half of it on Intel's, which have AMX for that; but virtual machines often hide AMX."""
    return "amx_bf16" in features or ("avx512_bf16" in features and vendor == "AuthenticAMD")


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


MALLOC_TRIM_THRESHOLD, MALLOC_MMAP_THRESHOLD = -1, -3
"""Numbers of options of glibc's mallopt."""


def keep_freed_memory() -> None:
    """Let malloc keep the memory that this process frees. A training step on a CPU frees and allocates the same tensors
    again and again, and by default each time the system maps their pages anew, an eighth of a step of `quickstart`.
    Does nothing on systems without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(MALLOC_MMAP_THRESHOLD, 2**25)  # the largest that glibc takes
        mallopt(MALLOC_TRIM_THRESHOLD, 2**31 - 1)


def synchronize(device: torch.device) -> None:
    """Wait until a GPU is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def peak_memory(device: torch.device) -> int | None:
    """Return the peak memory so far in bytes, of the GPU or else of the process; None on Windows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return None
    if kibibytes := _proc_field("/proc/self/status", r"^VmHWM:\s*(\d+) kB$"):
        return int(kibibytes) * 1024  # `getrusage` would include the peak of the parent process
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def describe_machine(device: torch.device) -> str:
    """Return the name of the GPU, or the processor's name and the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "mps":
        return f"GPU of {_processor()}"
    threads = torch.get_num_threads()
    return f"{threads} thread{'' if threads == 1 else 's'} of {_processor()}"


def peak_operations(device: torch.device) -> float | None:
    """Return the operations a second of a GPU's tensor cores; None if they are not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def _processor() -> str:
    return _proc_field("/proc/cpuinfo", r"^model name\s*:\s*(.+)$") or platform.processor() or platform.machine()


def _proc_field(file: str, pattern: str) -> str | None:
    """Return the first match of a pattern in a Linux system file; None on other systems."""
    try:
        match = re.search(pattern, Path(file).read_text(), re.MULTILINE)
    except OSError:
        return None
    return match[1] if match else None
