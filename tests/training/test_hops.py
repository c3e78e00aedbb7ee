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


class Hops:
    """The first chain of calls from a function to native code."""

    def __init__(self, patch: pytest.MonkeyPatch, module: ModuleType, first: Any):
        self.first, self.calls = first.__code__, list[str]()
        patch.setattr(module, "run_on_threads", self._run)

    def _run(self, *arguments: Any) -> None:
        if not self.calls:
            self.calls = self._chain()
        threads.run_on_threads(*arguments)

    def _chain(self) -> list[str]:
        frame, calls = sys._getframe(2), ["run_on_threads"]
        while frame is not None:
            if PACKAGE in Path(frame.f_code.co_filename).parents:
                calls.append(frame.f_code.co_qualname)
            if frame.f_code is self.first:
                return calls
            frame = frame.f_back
        return []


def test_few_calls_lead_to_native_code(recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = Hops(monkeypatch, native_kernel, TrainingModule.training_step)
    step = Hops(monkeypatch, native, row.advance)
    run = train(recipe_of("training.steps=1"), tmp_path / "run").run
    model = load(run)
    model.use_fast_engine()
    list(model.stream("a", max_tokens=2))
    assert 0 < len(scan.calls) <= TO_SCAN, scan.calls
    assert 0 < len(step.calls) <= TO_STEP, step.calls
