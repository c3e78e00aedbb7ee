"""Where the weights of the native step lie."""

from pathlib import Path

import pytest
import torch

from lmlong.native.decode.pack import pack_in_huge_pages


def test_the_pages_are_large() -> None:
    """Where the system gives large pages to those that ask for them."""
    known = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not known.exists() or "[never]" in known.read_text():
        pytest.skip("there are no large pages")
    weight = torch.randn(4 << 20)
    before = weight.clone()
    pack_in_huge_pages([weight])
    pages = [line for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if "AnonHugePages" in line]
    assert int(pages[0].split()[1]) >= 2 << 10  # kilobytes: memory in pieces may give fewer than were asked for
    assert torch.equal(weight, before)
