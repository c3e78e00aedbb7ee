"""The native decode step: which weights of a model have an address, and its constants."""

from pathlib import Path

import pytest
import torch
from torch import nn

from lmlong.attention.delta.layer import DeltaDecode
from lmlong.attention.ngram.layer import NgramDecode
from lmlong.native.decode.packer import NoNativeForm, Packer, pack_in_huge_pages
from lmlong.native.decode.step import merged_constants


def test_transposed_weight_is_packed_and_a_part_is_not() -> None:
    module = nn.Linear(2, 6, bias=False)
    packer = Packer(module)
    packer.known(module, nn.Linear)
    packer.floats(module, module.weight[:3])
    with pytest.raises(NoNativeForm, match="has weight, which is not supported"):
        packer.check_complete()
    packer.floats(module, module.weight, transposed=True)
    packer.check_complete()


def test_pages_are_large() -> None:
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


def test_conflicting_constants_are_refused() -> None:
    """A shared name would otherwise silently give one kind the other's value."""
    kinds = [DeltaDecode(), NgramDecode()]
    merged = merged_constants({"RMS_EPS": 0.5}, kinds)
    assert merged["RMS_EPS"] == 0.5 and kinds[0].constants.items() <= merged.items()
    name, value = next(iter(DeltaDecode.constants.items()))
    assert merged_constants({name: value}, kinds)[name] == value
    with pytest.raises(AssertionError, match=f"{name} is {value}, but"):
        merged_constants({name: value + 1}, kinds)
