"""Load native code: compiled for this processor, or prebuilt if no compiler works."""

import atexit
import ctypes
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import defaultdict
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Lock

from lmlong.errors import LmlongError, UsageError
from lmlong.io.cache import cache_folder, fetch, key_of
from lmlong.io.folder_manifest import Format
from lmlong.io.home import home_cache
from lmlong.io.trust import is_private
from lmlong.native import prebuilt, source
from lmlong.native.source import NativeCode

FLAGS = (*source.FLAGS, "-march=native")
MORE_FLAGS = "LMLONG_CXXFLAGS"
"""Environment variable with extra compiler flags, such as a sanitizer's."""
CHOICE = "LMLONG_NATIVE"
"""Environment variable. `prebuilt`: nothing is compiled."""
LIBRARY, CODE = Format("native code", 1), "code.so"
LOADING: dict[Path, Lock] = defaultdict(Lock)
"""Held while code from a folder is loaded, so that threads do not compile it twice."""


class NativeLibrary(ctypes.CDLL):
    """A library of native code."""

    def __init__(self, path: Path, origin: str):
        super().__init__(str(path))
        self.origin = origin
        """How it was made, in words."""


def load(code: NativeCode, otherwise: str) -> NativeLibrary | None:
    """Return the library of this code: compiled at its first use on a machine, or, if that is not possible, the one in
    the package that is prebuilt for this processor. Return None if there is neither. Messages quote `otherwise`: what
    happens then."""
    with LOADING[code.folder]:
        return _load(code, otherwise)


def _load(code: NativeCode, otherwise: str) -> NativeLibrary | None:
    compiler, failure = find_compiler(), None
    if compiler is not None:
        try:
            return NativeLibrary(_compiled(code, compiler), "compiled on this machine")
        except (OSError, subprocess.SubprocessError, LmlongError) as error:
            failure = getattr(error, "stderr", None) or str(error)
    if found := prebuilt.find(code):
        with suppress(OSError):  # of another C library than the wheel's
            return NativeLibrary(found.path, f"prebuilt for {found.level}")
    if failure is None:
        _print_once(f"native code is off, {otherwise}: it {missing_code()}")
    else:
        warnings.warn(f"{otherwise}: {compiler} could not compile native code:\n{failure[:1000]}", stacklevel=2)
    return None


def _compiled(code: NativeCode, compiler: str) -> Path:
    """Return the library compiled from the code for this processor, cached per machine."""
    flags = [*FLAGS, *shlex.split(os.environ.get(MORE_FLAGS, ""))]
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    key = key_of(code.key(), flags, compiler, version, prebuilt.processor())
    folder = private_folder(cache_folder()) / key
    return fetch(folder, LIBRARY, lambda into: code.compile([compiler, *flags], into / CODE), True) / CODE


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


def make_private(folder: Path) -> bool:
    """Create a folder if it is missing. Return whether only this user can write to it."""
    with suppress(OSError):
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    return is_private(folder)


def find_compiler() -> str | None:
    """Return a C++ compiler: $CXX, g++ or clang++. None if $LMLONG_NATIVE forbids compiling, and on Windows, which
    native code does not support."""
    if os.name == "nt" or _prebuilt_only():
        return None
    return next(filter(None, map(shutil.which, [os.environ.get("CXX", "g++"), "g++", "clang++"])), None)


def missing_code() -> str:
    """Return why there is no native code if `find_compiler` returns None."""
    if os.name == "nt":
        return "is not supported on Windows."
    if _prebuilt_only():
        return f"is not prebuilt for this processor, and {CHOICE} is prebuilt."
    return "needs a C++ compiler. Install g++, or name one in the environment variable CXX."


def _prebuilt_only() -> bool:
    choice = os.environ.get(CHOICE, "")
    if choice not in ("", "prebuilt"):
        raise UsageError(f"{CHOICE}: {choice} is not a value. Set it to prebuilt, or not at all.")
    return choice == "prebuilt"
