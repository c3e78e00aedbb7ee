"""The packages that lmlong needs beside torch, as wheels, for a machine without a network."""

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = [
    *("click", "einops", "fsspec", "jinja2", "numpy", "packaging", "pydantic>=2.10", "pyyaml", "ruamel.yaml"),
    *("safetensors", "sentencepiece>=0.2.3", "tqdm", "zstandard"),
]
"""What `lmlong train` imports, and flash-linear-attention, beside what needs torch."""

NEED_TORCH = ["fla-core>=0.6", "lightning>=2.6.6", "lightning-utilities", "torchmetrics"]
"""Downloaded without the packages that they need, since torch and its libraries are on the machine."""

LEFT_OUT = "deepspeed, datasets and matplotlib, which training from files in one process does not import"

PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")

MOST_MEBIBYTES = 50


def fetch(folder: Path, python: str) -> int:
    """Download the wheels for a version of Python on Linux, and print their size. Return 1 if it is too large."""
    for words in (PACKAGES, ["--no-deps", *NEED_TORCH]):
        platforms = [word for name in PLATFORMS for word in ("--platform", name)]
        pip("download", "-q", "--only-binary=:all:", "--python-version", python, *platforms, "-d", str(folder), *words)
    sizes = [file.stat().st_size for file in folder.glob("*.whl")]
    print(f"{len(sizes)} wheels, {sum(sizes) / 2**20:.1f} MiB. Left out: {LEFT_OUT}.")
    return int(sum(sizes) > MOST_MEBIBYTES * 2**20)


def install(folder: Path, target: Path) -> None:
    """Install the wheels of packages that are missing into a folder, which belongs on PYTHONPATH."""
    missing = [str(wheel) for wheel in sorted(folder.glob("*.whl")) if not installed(wheel)]
    if missing and not target.exists():
        pip("install", "-q", "--no-index", "--no-deps", "--no-compile", "--target", str(target), *missing)


def installed(wheel: Path) -> bool:
    """Return whether the package of a wheel is there, in a release that lmlong works with."""
    name = wheel.name.split("-")[0].replace("_", "-")
    oldest = dict(word.split(">=") for word in (*PACKAGES, *NEED_TORCH) if ">=" in word).get(name, "0")
    try:
        return numbers(version(name)) >= numbers(oldest)
    except PackageNotFoundError:
        return False


def numbers(release: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", release)]


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
