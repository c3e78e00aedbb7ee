"""Random prompts, valid and broken: what is broken is refused with a reason, all else is continued.

The prompt of a number that fails, and what is wrong: `tools/fuzz.py prompts --cases 1 --seed NUMBER`.
"""

from pathlib import Path

import pytest

from lmlong.inference.loading import TrainedLanguageModel, load

from .prompt_draws import fuzz, make_runs


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[TrainedLanguageModel]:
    return [load(run, "cpu") for run in make_runs(tmp_path_factory.mktemp("runs"))]


@pytest.mark.parametrize("number", range(30))
def test_a_drawn_prompt_is_continued_or_refused(
    models: list[TrainedLanguageModel], number: int, tmp_path: Path
) -> None:
    assert fuzz(number, models[number % 2], tmp_path)[1] == []
