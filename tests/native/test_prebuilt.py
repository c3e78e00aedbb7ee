"""Without a compiler, the library that was compiled beforehand from the same code for such a processor is used."""

import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from machine import needs_compiler

from lmlong.errors import UsageError
from lmlong.native import prebuilt
from lmlong.native.build import CHOICE, find_compiler, load
from lmlong.native.prebuilt import LEVELS, V3, V4, library_path, suitable_levels
from lmlong.native.source import FLAGS, NativeCode, Shared

SOURCE = '#include "shared.h"\nextern "C" int64_t answer() { return ANSWER; }\n'


def shared(answer: int = 7, more: Mapping[str, str] | None = None) -> Shared:
    return Shared({}, [], [], {"ANSWER": answer}, more or {})


@pytest.fixture
def code(tmp_path: Path) -> NativeCode:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "code.cpp").write_text(SOURCE)
    return NativeCode(folder, shared())


@pytest.fixture
def library(code: NativeCode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The code's library for the lowest level that this processor has, on a machine without a compiler."""
    compiler, level = find_compiler(), suitable_levels(prebuilt.processor_features())[-1]
    assert compiler is not None
    path = library_path(tmp_path / "prebuilt", level, code)
    path.parent.mkdir(parents=True)
    code.compile([compiler, *FLAGS, *LEVELS[level].flags], path)
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "prebuilt")
    monkeypatch.setenv("LMLONG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    return path


needs_level = pytest.mark.skipif(
    find_compiler() is None or not suitable_levels(prebuilt.processor_features()), reason="nothing is prebuilt here"
)


@needs_level
def test_prebuilt_code_is_used_without_a_compiler_or_by_choice(
    code: NativeCode,
    library: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    functions = load(code, "it is computed otherwise")
    assert functions is not None and functions.answer() == 7
    assert functions.origin == f"prebuilt for {library.parent.name}"
    assert capsys.readouterr() == ("", "") and not (tmp_path / "cache").exists()
    monkeypatch.undo()  # here is a compiler again
    monkeypatch.setattr(prebuilt, "FOLDER", library.parents[1])
    monkeypatch.setenv("LMLONG_CACHE", str(tmp_path / "cache"))
    for choice, origin in ((None, "compiled on this machine"), ("prebuilt", functions.origin)):
        if choice:
            monkeypatch.setenv(CHOICE, choice)
        chosen = load(code, "it is computed otherwise")
        assert chosen is not None and chosen.origin == origin


@needs_level
@pytest.mark.parametrize(
    "change", ["source", "new source", "shared header", "constant", "generated header", "damage to the library"]
)
def test_library_of_other_code_is_not_used(
    code: NativeCode, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    if change != "damage to the library":  # what is loaded would stay in memory
        assert load(code, "it is computed otherwise") is not None
    match change:
        case "source":
            (code.folder / "code.cpp").write_text(SOURCE + "\n")
        case "new source":
            (code.folder / "more.h").write_text("")
        case "shared header":
            monkeypatch.setattr("lmlong.native.source.SHARED_HEADERS", tmp_path / "headers")
            (tmp_path / "headers").mkdir()
        case "constant":
            code = code._replace(shared=shared(8))
        case "generated header":
            code = code._replace(shared=shared(7, {"kinds.h": ""}))
        case _:
            library.write_bytes(b"")
    assert load(code, "it is computed otherwise") is None


@pytest.mark.parametrize(
    ("machine", "features", "best"),
    [
        ("x86_64", V4 | {"avx512_vnni", "avx_vnni"}, "x86-64-v4-vnni"),
        ("x86_64", V4, "x86-64-v4"),
        ("x86_64", V4 - {"avx512bw"}, "x86-64-v3"),
        ("x86_64", V3 | {"avx_vnni"}, "x86-64-v3-vnni"),
        ("x86_64", V3 | {"avx512f", "avx512_vnni"}, "x86-64-v3"),
        ("x86_64", V3, "x86-64-v3"),
        *(("x86_64", V3 - {feature}, None) for feature in ("avx2", "fma", "f16c", "bmi2", "movbe")),
        ("x86_64", frozenset(), None),
        ("aarch64", {"fp", "asimd", "atomics", "asimddp"}, "armv8.2-dotprod"),
        ("aarch64", {"fp", "asimd"}, "armv8"),
        ("aarch64", V4, None),
        ("riscv64", V4 | {"asimd"}, None),
    ],
)
def test_best_level_of_a_processor(
    monkeypatch: pytest.MonkeyPatch, machine: str, features: set[str], best: str | None
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    levels = suitable_levels(frozenset(features))
    assert (levels[0] if levels else None) == best
    monkeypatch.setattr(sys, "platform", "darwin")
    assert suitable_levels(frozenset(features)) == []


@needs_compiler
def test_level_names_every_feature_of_its_code() -> None:
    """A level must name each feature that the compiler takes for given, by the names of Linux."""
    for level in ("x86-64-v3", "x86-64-v3-vnni", "x86-64-v4", "x86-64-v4-vnni"):
        assert compiler_features(LEVELS[level].flags) <= LEVELS[level].features, level


def compiler_features(flags: tuple[str, ...]) -> set[str]:
    """Return the instruction sets that the compiler enables by flags, as it names them."""
    compiler = find_compiler()
    assert compiler is not None
    words = [compiler, "-E", "-dM", "-x", "c++", "/dev/null", *flags]
    macros = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    known = {"SSE3", "SSSE3", "SSE4_1", "SSE4_2", "AVX", "AVX2", "BMI", "BMI2", "F16C", "FMA", "LZCNT", "MOVBE"}
    known |= {"POPCNT", "AVX512F", "AVX512BW", "AVX512CD", "AVX512DQ", "AVX512VL", "AVX512VNNI", "AVXVNNI"}
    defined = {line.split()[1].strip("_") for line in macros.splitlines() if line.startswith("#define __")}
    unknown = {name for name in defined if name.startswith("AVX512")} - known
    assert not unknown
    linux = {"SSE3": "pni", "BMI": "bmi1", "LZCNT": "abm", "AVX512VNNI": "avx512_vnni", "AVXVNNI": "avx_vnni"}
    return {linux.get(name, name.lower()) for name in known & defined}


@pytest.mark.parametrize("value", ["compile", "yes"])
def test_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(CHOICE, value)
    with pytest.raises(UsageError, match=f"{CHOICE}: {value} is not a value"):
        find_compiler()
