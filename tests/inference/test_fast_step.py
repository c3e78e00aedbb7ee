"""A compiled step writes what the one by torch writes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from machine import needs_native

from lmlong.cli.generate import generate
from lmlong.decode import native
from lmlong.decode.choice import why_no_fast_engine
from lmlong.errors import UsageError
from lmlong.inference.loading import load
from lmlong.model.language_model import LanguageModel
from lmlong.native import prebuilt
from lmlong.native.build import CHOICE
from lmlong.recipe import Attention, Model


@needs_native
def test_on_a_cpu_a_step_is_compiled_unless_it_is_unwanted(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    read = native.NativeEngine.read

    def counted(self: Any, *inputs: Any) -> Any:
        steps.append(1)
        return read(self, *inputs)

    monkeypatch.setattr(native.NativeEngine, "read", counted)
    for flags, expected in (([], 8), (["--fast-decode"], 8), (["--no-fast-decode"], 0)):
        steps.clear()
        # six steps compare the engine with torch; of the prompt's two tokens the second is read by a step
        asked = [str(run), "--device", "cpu", "--prompt", "a", "--max-tokens", "2", "--temperature", "0", *flags]
        done = CliRunner().invoke(generate, asked)
        assert (done.exit_code, done.stderr, len(steps)) == (0, "", expected)


@needs_native
def test_a_loaded_model_decodes_by_native_code_which_is_packed_again_when_weights_change(run: Path) -> None:
    model = load(run, "cpu")
    engines = []
    for _ in range(2):
        for _ in range(2):
            list(model.stream("a", max_tokens=1))
            engines.append(model.model.engine)
        with torch.no_grad():
            model.model.norm.weight.mul_(2.0)
    assert all(isinstance(engine, native.NativeEngine) for engine in engines)
    assert engines[0] is engines[1] is not engines[2] is engines[3]


@pytest.mark.gpu
def test_a_step_that_is_never_the_same_is_no_graph() -> None:
    model = LanguageModel(Model(width=16, layers=2, heads=2, attention=Attention(kind="softmax")), 30).eval().cuda()
    assert "grows" in str(why_no_fast_engine(model))


@pytest.fixture
def no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without a compiler and prebuilt code."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "none")
    monkeypatch.delenv(CHOICE, raising=False)
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "prebuilt")
    native.library.cache_clear()
    yield
    native.library.cache_clear()


def test_without_a_compiler_torch_writes(run: Path, no_library: None) -> None:
    with pytest.raises(UsageError, match=r"needs a C\+\+ compiler"):
        load(run, "cpu").use_fast_engine()
    asked = [str(run), "--device", "cpu", "--prompt", "a", "--max-tokens", "2"]
    assert CliRunner().invoke(generate, asked).exit_code == 0
