"""The native code of wheels: all libraries of the package, compiled for each level of its processors."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lmlong.decode import libraries
from lmlong.errors import LmlongError
from lmlong.native.prebuilt import LEVELS, library_path
from lmlong.native.source import FLAGS, NativeCode

LIBRARIES: dict[str, Callable[[], NativeCode]] = {name: made.code for name, made in libraries.LIBRARIES.items()}

COMPILERS = {"x86_64": "g++", "aarch64": "aarch64-linux-gnu-g++"}
"""By the machine that they compile for."""

PLATFORMS = {machine: f"manylinux_2_27_{machine}" for machine in COMPILERS}
"""The platform tags of wheels: glibc 2.27. Wheels of torch need 2.28."""

OLD_SYMBOLS = Path(__file__).parent / "old_symbols.h"


def compile_levels(folder: Path, levels: Sequence[str]) -> Iterator[str]:
    """Compile all libraries for these levels into a folder, and remove other files from it. Libraries that are there
    are kept, since their names tell what they were compiled from. Yield a line for each library."""
    paths = {library_path(folder, level, code()): (level, name) for level in levels for name, code in LIBRARIES.items()}
    for path in set(folder.rglob("*.so")) - paths.keys():
        path.unlink()
    for path, (level, name) in paths.items():
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            LIBRARIES[name]().compile([*command(level), *FLAGS], part := path.with_suffix(".part"))
            part.rename(path)
        yield f"{level}: {name}, {path.stat().st_size / 1000:.0f} kB"


def command(level: str) -> list[str]:
    """Return the compiler of a level with its flags. libstdc++ is linked dynamically, as torch does: linked statically,
    it would need the C library of the machine that compiles."""
    compiler = COMPILERS[LEVELS[level].machine]
    if shutil.which(compiler) is None:
        raise LmlongError(f"there is no {compiler}. Install it: apt-get install {package(compiler)}.")
    return [compiler, *LEVELS[level].flags, "-s", "-include", str(OLD_SYMBOLS)]


def package(compiler: str) -> str:
    return "g++-aarch64-linux-gnu" if compiler.startswith("aarch64") else compiler


def levels_of(machine: str) -> list[str]:
    return [name for name, level in LEVELS.items() if level.machine == machine]
