"""What the figures depend on: the machine, the versions, the date."""

import json
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "triton", "fla-core", "lightning", "numpy")


def show() -> None:
    """Print it as JSON."""
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    about: dict[str, Any] = {
        "gpu": gpu and f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB, compute capability {gpu.major}.{gpu.minor}",
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "driver": first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "commit": first_line("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"),
        "python": platform.python_version(),
    }
    print(json.dumps(about | {name: version_of(name) for name in PACKAGES}))


def first_line(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
