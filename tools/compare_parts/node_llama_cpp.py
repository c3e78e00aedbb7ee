"""llama.cpp, prebuilt for many processors, as the npm package node-llama-cpp has it."""

import platform
import shutil
import subprocess
from pathlib import Path

from lmlong.errors import UsageError

VERSION = "3.21.1"
BINARIES = {
    ("Linux", "x86_64"): "linux-x64",
    ("Linux", "aarch64"): "linux-arm64",
    ("Darwin", "x86_64"): "mac-x64",
    ("Darwin", "arm64"): "mac-arm64-metal",
}


def install(folder: Path) -> None:
    """Install the package into a folder, unless it is there."""
    system = (platform.system(), platform.machine())
    if system not in BINARIES:
        raise UsageError(f"node-llama-cpp has no library for {' '.join(system)}. Use one of {list(BINARIES.values())}.")
    binaries = f"@node-llama-cpp/{BINARIES[system]}"
    modules = folder / "node_modules"
    if all((modules / name / "package.json").exists() for name in ("node-llama-cpp", binaries)):
        return
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            raise UsageError(f"{program} is not installed. Install Node.js 20 or later.")
    folder.mkdir(parents=True, exist_ok=True)
    packages = [f"node-llama-cpp@{VERSION}", f"{binaries}@{VERSION}"]
    # other optional packages are hundreds of megabytes for GPUs
    options = ["--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund", "--fetch-retries=1"]
    command = ["npm", "install", "--prefix", str(folder), *options, *packages]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-5:]
        raise UsageError(
            "\n  ".join([f"npm cannot install {packages[0]} into {folder}:", *reason])
            + "\nConnect to a network, or copy a folder in which it is installed."
        )
