"""The machine and the versions that losses and digests depend on."""

import os
import platform
import shutil
import subprocess
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    *("torch", "numpy", "lightning", "sentencepiece"),
    *("safetensors", "deepspeed", "transformers"),
)
"""Packages that losses and digests depend on."""


def machine() -> dict[str, str]:
    """Return what losses and digests depend on beside the code."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "flags"))]
    flags = sha256(named[1].encode()).hexdigest()[:8] if len(named) > 1 else ""
    return {
        "processor": named[0] if named else platform.processor(),
        "flags": flags,
        "python": platform.python_version(),
        "compiler": compiler(),
        **{name: installed(name) for name in PACKAGES},
    }


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def compiler() -> str:
    """Return the name and version of the C++ compiler, by which native code is compiled."""
    command = shutil.which(os.environ.get("CXX", "c++"))
    if command is None:
        return "missing"
    done = subprocess.run([command, "--version"], capture_output=True, text=True)
    return done.stdout.partition("\n")[0]


def is_same_machine(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Return whether two lines are of the same machine and versions, by all that the earlier one names."""
    return all(now["machine"].get(name) == value for name, value in before["machine"].items())


def is_same_processor(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Return whether two lines are of processors of the same name and instructions: one name may stand for several."""
    return all(now["machine"].get(name) == before["machine"].get(name) for name in ("processor", "flags"))
