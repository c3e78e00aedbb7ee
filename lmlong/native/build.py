"""Compile a folder of C++ into a shared library."""

import atexit
import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from lmlong.errors import LmlongError
from lmlong.io.cache import cache_folder, fetch, key_of
from lmlong.io.folder_manifest import Format
from lmlong.io.home import home_cache
from lmlong.io.trust import make_private

SHARED_HEADERS = Path(__file__).parent
"""Folder of the headers that all native code includes."""
FLAGS = ("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC")
MORE_FLAGS = "LMLONG_CXXFLAGS"
"""Environment variable with extra compiler flags, such as a sanitizer's."""
LIBRARY, CODE = Format("native code", 1), "code.so"
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


def compiled(folder: Path, shared: Shared, otherwise: str) -> ctypes.CDLL | None:
    """Return the library compiled from the sources of a folder, cached per machine. Return None without a compiler or
    if it fails. Messages quote `otherwise`: what happens instead."""
    compiler = find_compiler()
    if compiler is None:
        _print_once(f"native code is off, {otherwise}: there is no C++ compiler. Install g++, or name one in CXX.")
        return None
    folders = (SHARED_HEADERS, folder)
    sources = sorted(path for each in folders for path in each.iterdir() if path.suffix in (".h", ".cpp"))
    more = shlex.split(os.environ.get(MORE_FLAGS, ""))
    headers, flags = shared.headers(), [*FLAGS, *more, f"-I{SHARED_HEADERS}", "-iquote", str(folder)]
    texts = [path.read_text() for path in sources]
    units = [str(path) for path in sources if path.suffix == ".cpp"]
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
        key = key_of(texts, [*FLAGS, *more], headers, compiler, version, _processor())
        library = fetch(
            private_folder(cache_folder()) / key,
            LIBRARY,
            lambda into: _compile([compiler, *flags, *units, "-o", str(into / CODE)], headers),
            True,
        )
        return ctypes.CDLL(str(library / CODE))
    except (OSError, subprocess.SubprocessError, LmlongError) as error:
        why = getattr(error, "stderr", None) or str(error)
        warnings.warn(f"{otherwise}: {compiler} could not compile native code:\n{why[:1000]}", stacklevel=2)
        return None


def _print_once(message: str) -> None:
    """Print a message to standard error once per cache folder."""
    marker = cache_folder() / "told" / key_of(message)
    if not marker.exists():
        print(message, file=sys.stderr)
        with suppress(OSError):
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()


@cache
def private_folder(cache: Path) -> Path:
    """Return the folder of compiled code, which only this user can write to: in `cache`, else in the home cache, else a
    temporary folder that is removed when the process exits."""
    first, *rest = dict.fromkeys([cache / "native", home_cache() / "native"])
    if make_private(first):
        return first.resolve()  # a link on the path could be replaced
    private = next((folder.resolve() for folder in rest if make_private(folder)), None)
    if private is None:
        private = Path(tempfile.mkdtemp(prefix="lmlong-native-"))
        atexit.register(shutil.rmtree, private, ignore_errors=True)
    warnings.warn(f"{first}: no folder, or others can write there, so native code is kept in {private}.", stacklevel=2)
    return private


def find_compiler() -> str | None:
    """Return a C++ compiler: $CXX, g++ or clang++. None on Windows, which native code does not support."""
    if os.name == "nt":
        return None
    return next(filter(None, map(shutil.which, [os.environ.get("CXX", "g++"), "g++", "clang++"])), None)


def missing_compiler() -> str:
    """Return why native code is off if `find_compiler` returns None."""
    if os.name == "nt":
        return "is not supported on Windows."
    return "needs a C++ compiler. Install g++, or name one in the environment variable CXX."


def _compile(command: list[str], headers: Mapping[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, text in headers.items():
            header = Path(folder) / name
            header.parent.mkdir(exist_ok=True)
            header.write_text(text)
        subprocess.run([*command, f"-I{folder}"], check=True, capture_output=True, text=True, timeout=COMPILER_TIMEOUT)


def _processor() -> str:
    """Return the instruction sets of this processor: compiled code depends on them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.machine())
