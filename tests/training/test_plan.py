"""What a dry run predicts, held against steps that were really taken."""

from collections import Counter

import pytest

from lmlong.data.data_module import DATA_MODULES
from lmlong.data.token_dataset import prepare
from lmlong.model.base import count_parameters
from lmlong.model.build import build, without_memory
from lmlong.recipe import Recipe
from lmlong.training import plan, profile
from lmlong.training.prepare import prepare_run
from lmlong.training.profile import BatchShape, StepProfile, profile_step
from lmlong.training.step_bytes import StepBytes

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


def planned(recipe: Recipe) -> plan.MemoryModel:
    """A model of memory without a profile: 1 MB, and 1 kB for each token."""
    model = plan.MemoryModel.__new__(plan.MemoryModel)
    model.recipe, model.rows, model.shorter, model.longer = recipe, recipe.training.batch_size, 512, 1024
    model.segmented, model.squared, model.bytes_a_token = False, recipe.model.quadratic, 1000.0
    model.first, model.second = (StepProfile(10**6, work, 0.0, 0, 0, 0) for work in (1.0, 2.0))
    model.lengths, model.longest = Counter([recipe.text.sequence_length]), recipe.text.sequence_length
    return model


def test_a_row_is_read_in_as_many_parts_as_fit(recipe_of: Recipes) -> None:
    recipe = recipe_of("text.sequence_length=4096", "devices=4", "training.batch_size=2", "training.accumulate=3")
    model = planned(recipe)
    costs = {parts: model.cost(1, None, parts) for parts in (1, 2, 4)}
    assert costs[1].bytes > costs[2].bytes + 1_900_000 > costs[4].bytes + 2_800_000
    proposal = plan._fit(recipe, costs[2].bytes, model)
    assert proposal is not None and proposal[1] == costs[2]
    assert proposal[0] == ["training.sequence_parallel=2", "training.batch_size=1", "training.accumulate=12"]
    found = recipe_of("text.sequence_length=4096", "devices=4", *proposal[0])
    assert found.sequences_per_step == recipe.sequences_per_step == 24
    assert costs[1].seconds == pytest.approx(costs[2].seconds) == pytest.approx(costs[4].seconds)  # of the same tokens


@pytest.mark.slow
def test_a_process_is_planned_with_the_memory_of_its_part(recipe_of: Recipes, short: None) -> None:
    options = ["text.sequence_length=4096", "model.width=64", "devices=4", "training.batch_size=1"]
    whole, quarter = (plan.make_plan(recipe_of(*options, f"training.sequence_parallel={parts}")) for parts in (1, 4))
    assert whole.tensors is not None and quarter.tensors is not None
    assert quarter.tensors.activations < 0.3 * whole.tensors.activations and whole.tensors.effects == 0
    assert quarter.tensors.effects > 0 and quarter.tensors.weights == whole.tensors.weights
    assert quarter.cost.bytes < whole.cost.bytes and quarter.tokens_per_step == whole.tokens_per_step / 4


def test_parts_that_a_recipe_refuses_are_not_proposed(recipe_of: Recipes) -> None:
    assert plan._more_parts(recipe_of("devices=12", "training.sequence_parallel=2")) == [4, 6, 12]
    assert plan._more_parts(recipe_of("devices=4", "nodes=3")) == [2, 4, 12]
    assert plan._more_parts(recipe_of("devices=16", "text.sequence_length=8")) == [2, 4, 8]
    for option in ("model.dropout=0.1", "training.compile=true", "training.segment=16"):
        assert plan._more_parts(recipe_of("devices=4", option)) == []


def test_segments_of_parts_are_not_proposed(recipe_of: Recipes) -> None:
    options = ("text.sequence_length=4096", "training.batch_size=1", "devices=2")
    for parts, proposal in ((1, ["training.segment=64"]), (2, None)):
        model = planned(recipe := recipe_of(*options, f"training.sequence_parallel={parts}"))
        model.segmented = True  # so that no segments are profiled
        fits = plan._fit(recipe, model.cost(1, 64).bytes, model)
        assert (fits and fits[0]) == proposal


def test_the_last_part_of_a_row_of_softmax_attention_takes_longest(recipe_of: Recipes) -> None:
    """Of the pairs of tokens in a row, the second half of its tokens has three quarters."""
    model = planned(recipe_of("model.attention.kind=softmax", "training.batch_size=1", "devices=2"))
    model.first, model.second = (StepProfile(0, work, 0.0, 0, 0, 0) for work in (1.0, 4.0))  # no linear part
    whole, half = model._row_seconds(1, 4096, 4096, 1), model._row_seconds(1, 4096, 4096, 2)
    assert half == pytest.approx(0.75 * whole)


def test_a_plan_says_what_each_process_holds(recipe_of: Recipes) -> None:
    recipe = recipe_of("devices=2", "training.sequence_parallel=2")
    tensors = StepBytes(10**9, 2 * 10**9, 3 * 10**9, 4 * 10**9, 5 * 10**9)
    text = plan.Plan(recipe, 1, 1, plan.StepCost(10**9, 1.0), None, None, None, tensors).text()
    assert "1.00 GB at the peak of a step in each process, which reads 32 tokens of each row\n" in text
    assert "\ntensors      1 GB weights, 2 GB gradients, 3 GB moments, 4 GB activations, 5 GB gathered effects" in text
