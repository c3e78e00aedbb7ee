"""The page and the file of figures, and what they say of the machine."""

import json
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpu_report_parts.part import NO_TIME
from lmlong.model.device import describe_machine

PACKAGES = ("lmlong", "torch", "triton", "flash-linear-attention", "deepspeed", "lightning", "numpy")

WARNING = """\
**Nothing here was measured on a GPU.** Tiny sizes ran on a CPU, the kernels in Triton's interpreter. That the tool runs
and the numbers are right is all that this page says; its times say nothing about any speed."""


class Report(NamedTuple):
    """What all parts found, by their titles."""

    tiny: bool
    machine: dict[str, str]
    allowed: float  # seconds
    begun: float  # by time.monotonic()
    parts: dict[str, dict[str, Any]]

    @property
    def failed(self) -> bool:
        return any(found["failures"] for found in self.parts.values())

    @property
    def verdict(self) -> str:
        late = any(NO_TIME in line for found in self.parts.values() for line in found["left_out"])
        return ("something failed" if self.failed else "nothing failed") + (", time ran out" if late else "")

    def write(self, folder: Path) -> None:
        """Write the page, and beside it all figures as JSON."""
        seconds = round(time.monotonic() - self.begun, 1)
        machine = {**self.machine, "time": f"{seconds:.0f} s of {self.allowed:.0f} s"}
        lines = [f"# lmlong on a {'CPU, to try the GPU report' if self.tiny else 'GPU'}: {self.verdict}", ""]
        lines += [WARNING, ""] if self.tiny else []
        lines += [f"- {name}: {value}" for name, value in machine.items()]
        lines += ["", "| part | result | seconds |", "|---|---|---|"]
        lines += [
            f"| {title} | {_verdict(found)} | {found.get('seconds', 0):.0f} |" for title, found in self.parts.items()
        ]
        for title, found in self.parts.items():
            lines += ["", f"## {title}", "", *found["lines"]]
            lines += _listed("Failed", found["failures"]) + _listed("Left out", found["left_out"])
        (folder / "report.md").write_text("\n".join(lines) + "\n")
        record = {"tiny": self.tiny, "machine": machine, "seconds": seconds, "parts": self.parts}
        (folder / "report.json").write_text(json.dumps(record, indent=1) + "\n")


def _verdict(found: dict[str, Any]) -> str:
    late = any(NO_TIME in line for line in found["left_out"])
    counts = [f"{len(found['left_out'])} left out"] if found["left_out"] else []
    if found["failures"]:
        return ", ".join([f"**{len(found['failures'])} failed**", *counts])
    return ", ".join(["out of time" if late else "ok", *counts])


def _listed(title: str, told: list[str]) -> list[str]:
    return ["", f"{title}:", "", *(f"- {line}" for line in told)] if told else []


def machine(tiny: bool, root: Path) -> dict[str, str]:
    """Return what figures hang on: the machine, the versions, the date."""
    about = {"date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())}
    if tiny:
        about["machine"] = f"no GPU, {describe_machine(torch.device('cpu'))}"
    else:
        gpu = torch.cuda.get_device_properties(0)
        about["machine"] = (
            f"{torch.cuda.device_count()} x {gpu.name}, {gpu.total_memory / 1e9:.0f} GB, the first is used"
        )
        about["compute capability"] = f"{gpu.major}.{gpu.minor}"
        about["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        about["CUDA of torch"] = str(torch.version.cuda)
    about["commit"] = _output("git", "-C", str(root), "describe", "--always", "--dirty")
    return {**about, "python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def _output(*command: str) -> str:
    """Return the first line that a command prints."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
