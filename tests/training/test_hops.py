"""Few calls of lmlong lie between a training step, or the loop that writes text, and native code."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import lmlong
from lmlong.attention import native_kernel
from lmlong.decode import native
from lmlong.inference import row
from lmlong.inference.loading import load
from lmlong.native import threads
from lmlong.native.build import find_compiler
from lmlong.training.module import TrainingModule
from lmlong.training.run import train

from .conftest import Recipes

PACKAGE = Path(lmlong.__file__).parent

TO_SCAN, TO_STEP = 9, 4
"""The most calls, with the first and the one that runs native code."""

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")


def first_chain(patch: pytest.MonkeyPatch, module: ModuleType, first: Any) -> list[str]:
    """The calls from a function to native code, once there was one."""
    calls: list[str] = []

    def run(*arguments: Any) -> None:
        frame, found = sys._getframe(1), ["run_on_threads"]
        while frame is not None and not calls:
            if PACKAGE in Path(frame.f_code.co_filename).parents:
                found.append(frame.f_code.co_qualname)
            if frame.f_code is first.__code__:
                calls.extend(found)
            frame = frame.f_back
        threads.run_on_threads(*arguments)

    patch.setattr(module, "run_on_threads", run)
    return calls


def test_few_calls_lead_to_native_code(recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = first_chain(monkeypatch, native_kernel, TrainingModule.training_step)
    step = first_chain(monkeypatch, native, row.advance)
    model = load(train(recipe_of("training.steps=1"), tmp_path / "run").run)
    model.use_fast_engine()
    list(model.stream("a", max_tokens=2))
    assert 0 < len(scan) <= TO_SCAN, scan
    assert 0 < len(step) <= TO_STEP, step
