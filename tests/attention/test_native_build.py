"""Compiling the scans: for any processor, once, and with torch in place of a library that cannot be compiled."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from attention.scans import scan_inputs
from attention.test_scans import LINEAR, assert_exact
from grids import every_nth
from machine import needs_compiler, on_other_processors

from lmlong.attention.linear import native
from lmlong.native import build, prebuilt


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An empty cache, no prebuilt libraries, and no library in memory before and after."""
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "prebuilt")
    monkeypatch.setenv("LMLONG_CACHE", str(tmp_path / "cache"))
    native.library.cache_clear()
    yield
    native.library.cache_clear()


@needs_compiler
@every_nth(5, on_other_processors)
def test_processors_with_other_instructions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: list[str]) -> None:
    """Compiled once, and loaded from the cache by the next process."""
    others = [flag.replace("-O3", "-O1") for flag in build.FLAGS if flag != "-march=native"]
    monkeypatch.setattr(build, "FLAGS", (*others, *flags))
    assert native.library() is not None
    for decay in ((), (LINEAR.features.features,)):
        assert_exact(LINEAR, "native", scan_inputs(100, [40], decay))
    (code,) = tmp_path.glob("cache/native/*/code.so")
    compiled = code.stat().st_mtime_ns
    native.library.cache_clear()
    assert native.library() is not None and code.stat().st_mtime_ns == compiled


def test_without_a_compiler_torch_takes_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "none")
    assert native.library() is None
    assert_exact(LINEAR, "native", scan_inputs(40))


def test_a_compiler_that_fails_is_named_and_torch_takes_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken-compiler"
    broken.write_text("#!/bin/sh\necho 'no such header' >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    message = r"by torch, slower: .*broken-compiler could not compile native code:\nno such header"
    with pytest.warns(UserWarning, match=message):
        assert native.library() is None
    assert_exact(LINEAR, "native", scan_inputs(40))
