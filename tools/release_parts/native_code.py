"""The native code of wheels: all libraries of the package, compiled for each level of its processors."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lmlong.decode import libraries
from lmlong.decode.image import page_code
from lmlong.errors import LmlongError
from lmlong.native.prebuilt import LEVELS, WASM, library_path
from lmlong.native.source import FLAGS, NativeCode

LIBRARIES: dict[str, Callable[[], NativeCode]] = {name: made.code for name, made in libraries.LIBRARIES.items()}

COMPILERS = {"x86_64": "g++", "aarch64": "aarch64-linux-gnu-g++"}
"""By the machine that they compile for."""

PACKAGES = {
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "clang++": "clang lld wasi-libc libc++-dev-wasm32 libclang-rt-dev-wasm32",
}
"""The packages of Debian that have compilers, if these have other names."""

WASM_FLAGS = (
    *("--target=wasm32-wasi", "--sysroot=/usr", "-nostdinc++", "-isystem", "/usr/include/wasm32-wasi/c++/v1"),
    *("-msimd128", "-mbulk-memory", "-std=c++17", "-O3", "-DNDEBUG"),
    *("-fno-exceptions", "-fno-rtti", "-nostartfiles", "-mexec-model=reactor", "-Wl,--no-entry", "-Wl,--strip-all"),
    *("-Wl,--export=allocate", "-Wl,--export=read_token", "-Wl,--export=advance"),
)
"""Of clang, for web browsers."""

PLATFORMS = {machine: f"manylinux_2_27_{machine}" for machine in COMPILERS}
"""The platform tags of wheels: glibc 2.27. Wheels of torch need 2.28."""

OLD_SYMBOLS = Path(__file__).parent / "old_symbols.h"


def compile_levels(folder: Path, levels: Sequence[str]) -> Iterator[str]:
    """Compile all libraries for these levels into a folder, and remove other files from it. Libraries that are there
    are kept, since their names tell what they were compiled from. Yield a line for each library."""
    paths = {path: (level, name, code) for level in levels for name, path, code in libraries_of(folder, level)}
    for path in {*folder.rglob("*.so"), *folder.rglob("*.wasm")} - paths.keys():
        path.unlink()
    for path, (level, name, code) in paths.items():
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            code.compile(command(level), part := path.with_suffix(".part"))
            part.rename(path)
        yield f"{level}: {name}, {path.stat().st_size / 1000:.0f} kB"


def libraries_of(folder: Path, level: str) -> Iterator[tuple[str, Path, NativeCode]]:
    """Yield the name, the path below a folder and the code of each library of a level."""
    made = {"decode step": page_code} if level == WASM else LIBRARIES
    for name, code in made.items():
        yield name, library_path(folder, level, code()), code()


def command(level: str) -> list[str]:
    """Return the compiler of a level with its flags. libstdc++ is linked dynamically, as torch does: linked statically,
    it would need the C library of the machine that compiles."""
    compiler = "clang++" if level == WASM else COMPILERS[LEVELS[level].machine]
    if shutil.which(compiler) is None:
        raise LmlongError(f"there is no {compiler}. Install it: apt-get install {PACKAGES.get(compiler, compiler)}.")
    if level == WASM:
        return [compiler, *WASM_FLAGS]
    return [compiler, *LEVELS[level].flags, "-s", "-include", str(OLD_SYMBOLS), *FLAGS]


def levels_of(machine: str) -> list[str]:
    """Return the levels of a wheel."""
    return [*(name for name, level in LEVELS.items() if level.machine == machine), WASM]
