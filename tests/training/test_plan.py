"""What a dry run predicts, held against steps that were really taken."""

from collections import Counter

import pytest

from lmlong.data.data_module import DATA_MODULES
from lmlong.data.token_dataset import prepare
from lmlong.model.base import count_parameters
from lmlong.model.build import build, without_memory
from lmlong.training import plan, profile
from lmlong.training.prepare import prepare_run
from lmlong.training.profile import BatchShape, StepProfile, profile_step

from .conftest import Recipes

LONG = ["text.sequence_length=4096", "text.rows=documents", "model.width=64", "training.batch_size=4"]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps shorter than usual, so that there is something to predict."""
    monkeypatch.setattr(plan, "LONGEST_PROFILED", 2048)


@pytest.mark.slow
def test_memory_grows_as_predicted_and_a_proposal_fits(recipe_of: Recipes, short: None) -> None:
    recipe = recipe_of(*LONG, "training.accumulate=3")
    growth = plan.MemoryModel(recipe, 4, segmented=False)
    measured = profile_step(recipe, BatchShape(4, 4096, None)).peak
    # what an allocator holds on to differs from time to time by more than one would like
    assert growth.cost(4, None).bytes == pytest.approx(measured, rel=0.35)
    assert growth.second.parameters == count_parameters(prepare_run(recipe).model)

    of_two, of_four = growth.cost(2, None), growth.cost(4, None)
    little = of_two.bytes + (of_four.bytes - of_two.bytes) // 4
    proposal = plan._fit(recipe, little, growth)
    assert proposal == (["training.batch_size=2", "training.accumulate=6"], of_two)
    assert recipe_of(*LONG, *proposal[0]).sequences_per_step == recipe.sequences_per_step
    found = plan.Plan(recipe, growth.second.parameters, growth.second.moments, of_four, little, proposal)
    assert found.tokens_per_step == 4 * 3 * 4096 and found.steps == 12
    assert "enough with training.batch_size=2 training.accumulate=6" in found.text()
    assert of_four.seconds > 0


def test_rows_of_documents_are_planned_by_the_lengths_that_are_trained_on(recipe_of: Recipes) -> None:
    recipe = recipe_of("text.sequence_length=524288", "text.rows=documents", "training.batch_size=1")
    tokens = prepare(recipe.text)
    batches = DATA_MODULES["causal"](recipe, tokens).training()
    lengths = plan._row_lengths(recipe, tokens)
    assert lengths == [batches.batch(number)[0].shape[1] for number in range(12)] == [32768] * 12

    model = plan.MemoryModel.__new__(plan.MemoryModel)
    model.recipe, model.rows, model.shorter, model.longer = recipe, 1, 512, 1024
    model.segmented, model.squared, model.bytes_a_token = True, False, 10.0
    model.first, model.second = (StepProfile(0, work, 0.0, 0, 0, 1000) for work in (1.5, 3.0))  # of three segments
    seconds = []
    for lengths in ([524288], [32768], [32768, 65536], [1000, 1000]):
        model.lengths, model.longest = Counter(lengths), max(lengths)
        seconds.append(model.cost(1, 1024).seconds)
    assert seconds == pytest.approx([512, 32, 48, 1000 / 1024])
    found = plan.Plan(recipe, 1, 1, model.cost(1, 1024), None, None, 1000.0)
    assert found.tokens_per_step == 1000 and "12 of about 1,000 tokens: 12,000 tokens in all" in found.text()


def test_profiled_steps_of_a_large_model_are_shorter(recipe_of: Recipes) -> None:
    """Of 135 million parameters, a step of 8,192 tokens takes minutes on a CPU."""
    assert plan._profiled_tokens(recipe_of("device=cpu"), 300) is None
    large = recipe_of("device=cpu", "model.width=576", "model.layers=30", "model.heads=9")
    with without_memory():
        parameters = count_parameters(build(large, 49_152))
    tokens = plan._profiled_tokens(large, 49_152)
    assert parameters > 100_000_000 and tokens is not None
    assert 6 * parameters * tokens <= plan.PROFILED_WORK < 6 * parameters * (tokens + 1)


@pytest.mark.parametrize(("seconds", "passes"), [(0.0, 1), (1e9, 8)])
def test_a_first_step_that_takes_long_is_the_only_one(
    recipe_of: Recipes, monkeypatch: pytest.MonkeyPatch, seconds: float, passes: int
) -> None:
    taken, backward = [], profile._backward
    monkeypatch.setattr(profile, "LONG_SECONDS", seconds)
    monkeypatch.setattr(profile, "ENOUGH_SECONDS", 1e9)
    monkeypatch.setattr(profile, "_backward", lambda *of: [taken.append(1), backward(*of)])
    assert profile._profile(recipe_of(), BatchShape(1, 16, None), profile.TIMED_STEPS).work > 0
    assert len(taken) == passes


@pytest.mark.parametrize("shorter", [0.1, 0.5, 1.0, 3.0], ids="{} s".format)
def test_a_step_that_another_program_slowed_down_foretells_no_time_below_zero(shorter: float) -> None:
    model = plan.MemoryModel.__new__(plan.MemoryModel)
    model.rows, model.shorter, model.longer, model.segmented, model.squared = 2, 512, 1024, False, False
    model.first, model.second = (StepProfile(0, work, 0.0, 0, 0, 0) for work in (shorter, 1.0))
    times = [model._seconds(rows, held) for rows, held in ((1, 256), (2, 512), (2, 1024), (2, 4096), (8, 4096))]
    assert 0 < times[0] < times[1] < times[2] == 1.0 < times[3] < times[4] <= 16
