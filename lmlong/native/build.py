"""Compiling a folder of C++ into a library of callable functions."""

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

HERE = Path(__file__).parent
"""Folder of the headers that all native code shares."""
FLAGS = ("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC")
MORE_FLAGS = "LMLONG_CXXFLAGS"
"""Environment variable of more flags for the compiler, such as those of a sanitizer."""
LIBRARY, CODE = Format("native code", 1), "code.so"
COMPILING = 300
"""Timeout of the compiler in seconds; a few are usual."""


class Shared(NamedTuple):
    """What C++ and Python share. Python defines numbers; C++ defines structures, and Python's must lie alike."""

    constants: Mapping[str, float]
    enums: Sequence[type[IntEnum]]
    structures: Sequence[type[ctypes.Structure]]
    integers: Mapping[str, int] = MappingProxyType({})
    more_headers: Mapping[str, str] = MappingProxyType({})
    """Text of headers from elsewhere, by the names by which they are included."""

    def headers(self) -> dict[str, str]:
        """Return the text of headers by their names: definitions for the begin of the sources, and assertions for their
        end, so that C++ of another layout does not compile."""
        constants = [f"constexpr float {name} = {value!r}f;" for name, value in self.constants.items()]
        constants += [f"constexpr int64_t {name} = {value};" for name, value in self.integers.items()]
        enums = [f"enum {e.__name__} {{ {', '.join(f'{x.name} = {x.value}' for x in e)} }};" for e in self.enums]
        definitions = ["#pragma once", "#include <cstdint>", "namespace {", *constants, *enums, "}"]
        assertions = ["#include <cstddef>", *(line for each in self.structures for line in _layout(each))]
        made = {"shared.h": "\n".join(definitions) + "\n", "layout.h": "\n".join(assertions) + "\n"}
        return {**made, **self.more_headers}


def _layout(structure: type[ctypes.Structure]) -> Iterator[str]:
    """Iterate over assertions that C++ has the same fields at the same offsets, and no others."""
    name = structure.__name__
    for field, *_ in structure._fields_:
        descriptor = getattr(structure, field)
        same = f"offsetof({name}, {field}) == {descriptor.offset} && sizeof({name}::{field}) == {descriptor.size}"
        yield f'static_assert({same}, "{name}.{field} lies elsewhere in Python");'
    yield f'static_assert(sizeof({name}) == {ctypes.sizeof(structure)}, "{name} has other fields in Python");'


def compiled(folder: Path, shared: Shared, otherwise: str) -> ctypes.CDLL | None:
    """Return the library compiled from the sources of a folder, once on each machine; None where there is no compiler,
    or, with a warning that says what is done `otherwise`, where it fails."""
    compiler = find_compiler()
    if compiler is None:
        _print_once(f"native code is off, {otherwise}: there is no C++ compiler. Install g++, or name one in CXX.")
        return None
    sources = sorted(path for each in (HERE, folder) for path in each.iterdir() if path.suffix in (".h", ".cpp"))
    more = shlex.split(os.environ.get(MORE_FLAGS, ""))
    headers, flags = shared.headers(), [*FLAGS, *more, f"-I{HERE}", "-iquote", str(folder)]
    texts = [path.read_text() for path in sources]
    units = [str(path) for path in sources if path.suffix == ".cpp"]
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
        key = key_of(texts, [*FLAGS, *more], headers, compiler, version, _processor())
        made = fetch(
            private_folder(cache_folder()) / key,
            LIBRARY,
            lambda into: _compile([compiler, *flags, *units, "-o", str(into / CODE)], headers),
            True,
        )
        return ctypes.CDLL(str(made / CODE))
    except (OSError, subprocess.SubprocessError, LmlongError) as error:
        why = getattr(error, "stderr", None) or str(error)
        warnings.warn(f"{otherwise}, for {compiler} made no native code:\n{why[:1000]}", stacklevel=2)
        return None


def _print_once(what: str) -> None:
    """Print a message on standard error, once for each cache folder; without one, once in a process."""
    marker = cache_folder() / "told" / key_of(what)
    if not marker.exists():
        print(what, file=sys.stderr)
        with suppress(OSError):
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()


@cache
def private_folder(cache: Path) -> Path:
    """Return the folder of compiled code: in the cache, or, where others can write to that and so replace the code, in
    one of this user's own; where there is none, a folder that is removed with this process."""
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
    """Return a C++ compiler: $CXX, g++ or clang++; none on Windows, for which the native code is not written."""
    if os.name == "nt":
        return None
    return next(filter(None, map(shutil.which, [os.environ.get("CXX", "g++"), "g++", "clang++"])), None)


def missing_compiler() -> str:
    """Return what native code lacks where there is no compiler."""
    if os.name == "nt":
        return "is not made on Windows."
    return "needs a C++ compiler. Install g++, or name one in the environment variable CXX."


def _compile(command: list[str], headers: Mapping[str, str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, text in headers.items():
            header = Path(folder) / name
            header.parent.mkdir(exist_ok=True)
            header.write_text(text)
        subprocess.run([*command, f"-I{folder}"], check=True, capture_output=True, text=True, timeout=COMPILING)


def _processor() -> str:
    """Return the features of this processor, which code compiled for it depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.machine())
