"""A kind of attention brings its own native decode step: the engine need not know it."""

import ctypes
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from decode.test_native import shaped
from machine import needs_compiler
from torch import nn

from lmlong.attention.registry import CAUSAL
from lmlong.attention.softmax.layer import KEY_VALUES
from lmlong.attention.window.layer import WEIGHTS, WindowAttention, WindowDecode
from lmlong.decode import native
from lmlong.decode.choice import fast_engine, why_no_fast_engine
from lmlong.decode.native import NativeEngine
from lmlong.native.build import MORE_FLAGS
from lmlong.native.decode.packer import Packer
from lmlong.native.decode.structures import structure
from lmlong.recipe import Attention

pytestmark = needs_compiler

HEADER = WindowDecode.header.read_text().replace("WindowAttention", "OwnWindow")


class OwnDecode(WindowDecode):
    name = "OwnWindow"
    weights = structure("OwnWindow::Weights", *WEIGHTS)
    state = structure("OwnWindow::State", *KEY_VALUES)

    def pack(self, packer: Packer, attention: Any, gates: Mapping[str, nn.Module]) -> ctypes.Structure:
        return self.weights(packer.known(attention, OwnWindow).window)


class OwnWindow(WindowAttention):
    """A window by another name, with a header of its own."""

    native_decode = OwnDecode()


@pytest.fixture(autouse=True)
def header(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The header of the kind, in a folder as those of lmlong, and models in which it takes the place of a window."""
    path = tmp_path / "own_window" / "decode.h"
    path.parent.mkdir(parents=True)
    path.write_text(HEADER)
    monkeypatch.setattr(OwnDecode, "header", path)
    monkeypatch.setitem(CAUSAL, "window", lambda heads, key, value, options: OwnWindow(heads, key, value, 5))
    monkeypatch.setenv("LMLONG_CACHE", str(tmp_path))
    monkeypatch.setenv(MORE_FLAGS, "-O0")  # compiles sooner
    native.library.cache_clear()
    yield path
    native.library.cache_clear()


MIXED = {"layers": 4, "attention": Attention(kind=["window", "linear", "ngram", "softmax"])}


def test_a_kind_with_a_header_of_its_own_is_decoded_by_native_code() -> None:
    """`fast_engine` compares its steps, among layers of other kinds, with those of torch."""
    engine = fast_engine(shaped(MIXED))
    assert isinstance(engine, NativeEngine)
    assert engine.packed.kinds[0] is OwnWindow.native_decode


def test_a_kind_without_one_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnWindow, "native_decode", None)
    assert "OwnWindow has no native decode step" in str(why_no_fast_engine(shaped(MIXED)))
