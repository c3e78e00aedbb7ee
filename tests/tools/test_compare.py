"""The comparison with llama.cpp: its figures, from what the processes measured."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from lmlong.errors import UsageError

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(TOOLS)
    for name in [name for name in sys.modules if name.partition(".")[0] == "compare_parts"]:
        monkeypatch.delitem(sys.modules, name)
    from compare_parts import decode

    return decode


def measured(decode: ModuleType, name: str, length: int, decode_seconds: float, predicted: list[int]) -> object:
    prefill, seconds = {"cpu": 4.0, "wall": 9.0}, {"cpu": decode_seconds, "wall": 99.0}
    return decode.Measured(name, length, length, prefill, seconds, predicted)


def test_figures_are_medians_of_processor_time(decode: ModuleType) -> None:
    """Three rounds of 4 tokens: llama.cpp takes 1, 2, 4 s, int4 takes 1, 1, 1 s."""
    results = []
    for theirs in (1.0, 2.0, 4.0):
        results += [measured(decode, "llama.cpp", length, theirs, [1, 2, 3, 4]) for length in (128, 2048)]
        results += [measured(decode, "int4", length, 1.0, [1, 2, 3, 5]) for length in (128, 2048)]
    told = {"version": "v1", "library": "libggml-cpu-haswell.so", "instructions": ""}
    comparison = decode.Comparison("model.gguf", "a processor", told, 4, 3, results)
    assert comparison.speeds("decode", "llama.cpp", 128) == [4, 2, 1]
    assert comparison.ratios("decode", "int4", 2048) == [1, 2, 4]
    assert comparison.speeds("prefill", "int4", 2048) == [512] * 3
    assert comparison.agreement("int4") == 0.75
    shown = decode.table(comparison)
    assert max(map(len, shown.splitlines())) <= 80
    assert "2.00 ±75%" in shown and "libggml-cpu-haswell.so" in shown and "int4 75%" in shown
    medians = decode.to_json(comparison)["medians"]
    assert medians[1] == {
        **{"candidate": "int4", "length": 128, "decode_tokens_per_second": 4.0, "prefill_tokens_per_second": 32.0},
        **{"decode_ratio": 2.0, "prefill_ratio": 1.0},
    }


def test_what_cannot_be_measured_is_refused(decode: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        decode.compare(tmp_path / "model.gguf", tmp_path, ["int8"], [128], 32, 1)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(UsageError, match=r"\[128, 150\] are nearer to each other than --tokens 32"):
        decode.compare(tmp_path / "model.gguf", tmp_path, ["int8"], [150, 128], 32, 1)


def test_missing_programs_are_named(decode: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from compare_parts import node_llama_cpp

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"node is not installed|has no library for"):
        node_llama_cpp.install(tmp_path / "packages")
