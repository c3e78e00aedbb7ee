"""Native code with a mistake in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from lmlong.native import build


@contextmanager
def native_mistake(
    monkeypatch: pytest.MonkeyPatch, folder: Path, native: ModuleType, right: str, wrong: str
) -> Iterator[None]:
    """A scan whose C++ has `wrong` in the one place where it should have `right`, compiled in a folder of its own."""
    found = 0
    for path in (*native.CODE.glob("*.h"), *native.CODE.glob("*.cpp"), build.SHARED_HEADERS / "decay.h"):
        text = path.read_text()
        found += text.count(right)
        (folder / path.name).write_text(text.replace(right, wrong))
    assert found == 1
    monkeypatch.setattr(native, "CODE", folder)
    monkeypatch.setenv("LMLONG_CACHE", str(folder / "cache"))
    monkeypatch.setattr(build, "FLAGS", [flag.replace("-O3", "-O1") for flag in build.FLAGS])  # it runs for a moment
    native.library.cache_clear()
    try:
        yield
    finally:
        native.library.cache_clear()
