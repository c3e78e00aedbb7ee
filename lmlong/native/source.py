"""The C++ of a library: a folder of sources, the shared headers, and headers that Python generates."""

import ctypes
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from lmlong.io.cache import key_of

SHARED_HEADERS = Path(__file__).parent
"""Folder of the headers that all native code includes."""
FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC")
"""Compiler flags for every processor."""
COMPILER_TIMEOUT = 300
"""Seconds. A few are usual."""


class Shared(NamedTuple):
    """Definitions that C++ and Python share. Python defines the numbers. C++ defines the structures, and Python's must
    have the same layout."""

    constants: Mapping[str, float]
    enums: Sequence[type[IntEnum]]
    structures: Sequence[type[ctypes.Structure]]
    integers: Mapping[str, int] = MappingProxyType({})
    more_headers: Mapping[str, str] = MappingProxyType({})
    """Texts of further headers by their include names."""

    def headers(self) -> dict[str, str]:
        """Return the texts of all headers by their include names. shared.h, included first, holds the definitions.
        layout.h, included last, asserts the layouts, so a mismatch does not compile."""
        constants = [f"constexpr float {name} = {value!r}f;" for name, value in self.constants.items()]
        constants += [f"constexpr int64_t {name} = {value};" for name, value in self.integers.items()]
        enums = [f"enum {e.__name__} {{ {', '.join(f'{x.name} = {x.value}' for x in e)} }};" for e in self.enums]
        definitions = ["#pragma once", "#include <cstdint>", "namespace {", *constants, *enums, "}"]
        assertions = ["#include <cstddef>", *(line for each in self.structures for line in _layout(each))]
        generated = {"shared.h": "\n".join(definitions) + "\n", "layout.h": "\n".join(assertions) + "\n"}
        return {**generated, **self.more_headers}


def _layout(structure: type[ctypes.Structure]) -> Iterator[str]:
    """Yield static assertions that the C++ structure has exactly these fields at these offsets."""
    name = structure.__name__
    for field, *_ in structure._fields_:
        descriptor = getattr(structure, field)
        equal = f"offsetof({name}, {field}) == {descriptor.offset} && sizeof({name}::{field}) == {descriptor.size}"
        yield f'static_assert({equal}, "{name}.{field} has another offset or size in Python");'
    yield f'static_assert(sizeof({name}) == {ctypes.sizeof(structure)}, "{name} has other fields in Python");'


class NativeCode(NamedTuple):
    """The sources in a folder, and the definitions that they share with Python."""

    folder: Path
    shared: Shared

    def key(self) -> str:
        """Return a hash of everything that a library of this code is compiled from, whatever the compiler."""
        return key_of([(path.name, path.read_text()) for path in self._sources()], self.shared.headers())

    def compile(self, command: Sequence[str], library: Path) -> None:
        """Compile the code into a library by a command: a compiler and its flags."""
        units = [str(path) for path in self._sources() if path.suffix == ".cpp"]
        with tempfile.TemporaryDirectory() as generated:
            for name, text in self.shared.headers().items():
                header = Path(generated) / name
                header.parent.mkdir(exist_ok=True)
                header.write_text(text)
            folders = [f"-I{SHARED_HEADERS}", "-iquote", str(self.folder), f"-I{generated}"]
            words = [*command, *folders, *units, "-o", str(library)]
            subprocess.run(words, check=True, capture_output=True, text=True, timeout=COMPILER_TIMEOUT)

    def _sources(self) -> list[Path]:
        folders = (SHARED_HEADERS, self.folder)
        return sorted(path for each in folders for path in each.iterdir() if path.suffix in (".h", ".cpp"))
