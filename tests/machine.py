"""What a test needs of the machine it runs on."""

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from lmlong.attention.linear.native import library
from lmlong.decode import native
from lmlong.io.cache import cache_folder
from lmlong.native import prebuilt
from lmlong.native.build import find_compiler, make_private
from lmlong.native.grouped import kernel as grouped
from lmlong.native.prebuilt import LEVELS, processor_features, suitable_levels

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
needs_fla = pytest.mark.skipif(find_spec("fla") is None, reason="flash-linear-attention is not installed")
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
needs_native = pytest.mark.skipif(
    find_compiler() is None and prebuilt.find(grouped.code()) is None, reason="needs a C++ compiler or prebuilt code"
)
"""With LMLONG_NATIVE=prebuilt, these tests run with the libraries that `tools/release native` compiles."""


NATIVE = cache_folder() / "native"
"""The native code of all tests that do not choose a cache."""


def new_cache(folder: Path) -> Path:
    """Return a cache in a folder that is empty but for the native code of the usual cache, which takes a while to
    compile."""
    cache = folder / "cache"
    cache.mkdir(exist_ok=True)
    if make_private(NATIVE) and not (cache / "native").exists():
        (cache / "native").symlink_to(NATIVE)
    return cache


def processor_flags() -> set[str]:
    """The instructions the processor says it has; none where it does not say."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return {flag for line in lines if line.startswith("flags") for flag in line.split(":")[1].split()}


def older_processor(*needs: str) -> pytest.MarkDecorator:
    lacking = find_compiler() is None or not processor_flags().issuperset(needs)
    return pytest.mark.skipif(lacking, reason=f"there is no compiler, or the processor lacks {needs}")


_LOWER_LEVELS = suitable_levels(processor_features())[1:]
"""Levels of prebuilt code that this processor also runs; the first is about what is compiled for it."""


on_other_processors = pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["-march=x86-64"], marks=older_processor("sse2")),
        pytest.param(["-mavx2", "-mfma"], marks=older_processor("avx2", "fma")),
        *(
            pytest.param(
                [*LEVELS[level].flags],
                marks=pytest.mark.skipif(
                    find_compiler() is None or level not in _LOWER_LEVELS,
                    reason=f"there is no compiler, or {level} is no lower level of this processor",
                ),
            )
            for level in ("x86-64-v3", "x86-64-v3-vnni", "x86-64-v4")
        ),
    ],
    ids=" ".join,
)
"""Compiler flags of processors with fewer lanes or instructions than this one; sse2 stands for x86-64."""


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Return a context with a limit on the size of files, which fails as a full disk does: in the middle of a file.
    Native code is loaded before: a failure to compile it would be remembered. It ends within the test, since what
    pytest itself writes may go to a file too."""
    native.library(), library()
    usual, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        signal.signal(signal.SIGXFSZ, handler)
