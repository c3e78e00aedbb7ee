"""The instruction sets of this machine's processor."""

import platform
from pathlib import Path


def processor_features() -> frozenset[str]:
    """Return the instruction sets as Linux lists them; empty on other systems."""
    _, _, features = processor().partition(":")
    return frozenset(features.split())


def processor() -> str:
    """Return a text that is the same on processors with the same instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.machine())
