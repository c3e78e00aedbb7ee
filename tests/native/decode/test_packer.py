"""The addresses of weights, and which weights of a model have one."""

from pathlib import Path

import pytest
import torch
from torch import nn

from lmlong.native.decode.packer import NoNativeForm, Packer, pack_in_huge_pages


def test_a_transposed_weight_is_packed_and_a_part_of_one_is_not() -> None:
    module = nn.Linear(2, 6, bias=False)
    packer = Packer(module)
    packer.known(module, nn.Linear)
    packer.floats(module, module.weight[:3])
    with pytest.raises(NoNativeForm, match="has weight, which is not supported"):
        packer.check_complete()
    packer.floats(module, module.weight, transposed=True)
    packer.check_complete()


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
