"""What a row of a batch reads on from: the state of the batch before, that of another text, or what was learned."""

from pathlib import Path

import pytest
import torch

from lmlong.checkpoint import read
from lmlong.checkpoint.location import BEST
from lmlong.data.shuffle import draw
from lmlong.errors import RecipeError, UsageError
from lmlong.model.language_model import LanguageModel
from lmlong.model.learning.loss import loss_while_learning
from lmlong.model.loss import IGNORED
from lmlong.model.metrics import batch_tensors, text_nll
from lmlong.model.segments import text_loss
from lmlong.model.state import detach_state, where_state
from lmlong.training.loader import PASSED
from lmlong.training.prepare import prepare_run
from lmlong.training.run import train

from .conftest import Recipes, losses

CARRY = "training.carry_state=true"


def test_the_loss_is_that_of_one_long_text(recipe_of: Recipes, trained: Path, tmp_path: Path) -> None:
    """With weights that do not move, three batches of 64 tokens lose what one of 192 does."""
    still = [f"training.init_from={trained}", "training.learning_rate=1e-30", "training.steps=3", CARRY]
    train(recipe_of(*still), tmp_path / "run")
    setup = prepare_run(recipe_of(*still), read.find(trained, BEST))
    parts = [batch_tensors(setup.data.training().batch(number)) for number in range(3)]
    tokens, targets, starts = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
    with torch.no_grad():
        nats, _ = text_loss(setup.model, tokens, targets, starts)
        scored = (targets != IGNORED).sum()
        alone = [text_loss(setup.model, *part) for part in parts]
    assert sum(losses(tmp_path / "run")) / 3 == pytest.approx(float(nats / scored), rel=1e-4)
    assert sum(float(nats) for nats, _ in alone) != pytest.approx(float(nats), rel=1e-6)


def test_each_source_needs_a_row(recipe_of: Recipes, tmp_path: Path) -> None:
    book = f"{{kind: files, paths: [{recipe_of().text.sources[0].paths[0]}]}}"
    sources = f"text.sources=[{book}, {book}]"
    few = recipe_of(CARRY, sources, "training.batch_size=1")
    with pytest.raises(UsageError, match=r"training\.batch_size: .* 1 of 2 sources would get none of 1 rows"):
        train(few, tmp_path / "run")


def test_it_is_validated_along_its_state(recipe_of: Recipes, tmp_path: Path) -> None:
    """The figure is that of the parts of the text, each read at once, and not that of short windows."""
    options = (CARRY, "training.steps=40", "text.validation.fraction=0.2")
    outcome = train(recipe_of(*options), tmp_path / "run")
    setup = prepare_run(recipe_of(*options), read.find(tmp_path / "run"))
    batches = [batch_tensors(batch) for batch in setup.data.validation()]
    nats = 0.0
    half = len(batches) // 2  # of the batches: 8 parts are read 4 at a time
    for group in (batches[:half], batches[half:]):
        whole = [torch.cat(part, dim=1) for part in zip(*group, strict=True)]
        nats += float(text_nll(setup.model.eval(), *whole)[0].sum())
    assert outcome.validation is not None and outcome.validation.nats == pytest.approx(nats, rel=1e-5)
    alone = sum(float(text_nll(setup.model, *batch)[0].sum()) for batch in batches)
    assert abs(alone - nats) > 1e-3 * nats


def test_what_is_carried_is_in_the_checkpoint(recipe_of: Recipes, trained: Path, tmp_path: Path) -> None:
    train(recipe_of(CARRY), tmp_path / "carried")
    carried, none = (
        [x for part, x in read.read_training(read.find(run)).items() if part.startswith("carried.")]
        for run in (tmp_path / "carried", trained)
    )
    assert none == []
    assert [len(tensor) for tensor in carried] == [4] * len(carried)
    assert all(tensor.isfinite().all() for tensor in carried)
    assert losses(tmp_path / "carried") != losses(trained)


# --- the state of another text


HALF = "training.state_passing=0.5"


def test_a_share_of_the_rows_reads_on_from_another_text(recipe_of: Recipes, trained: Path, tmp_path: Path) -> None:
    """With weights that do not move, the loss is that of rows read by hand, some from the state of the row before."""
    still = [f"training.init_from={trained}", "training.learning_rate=1e-30", "training.steps=6", HALF]
    train(recipe_of(*still), tmp_path / "run")
    setup = prepare_run(recipe_of(*still), read.find(trained, BEST))
    before, expected, rows = None, [], []
    for number in range(6):
        tokens, targets, starts = batch_tensors(setup.data.training().batch(number))
        state = setup.model.init_state(4)
        if before is not None:
            passed = torch.tensor([draw(0, PASSED, number, row) < 2**63 for row in range(4)])
            starts = starts & ~(passed[:, None] & (torch.arange(64) == 0))
            state = where_state(passed, before, state)
            rows += passed.tolist()
        with torch.no_grad():
            nats, after = text_loss(setup.model, tokens, targets, starts, state)
        before = detach_state(after)
        expected.append(float(nats / (targets != IGNORED).sum()))
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-5)
    assert 5 <= sum(rows) <= 15, "of 20, about a half"
    assert before is not None and before.position.max() > 64, "positions go on"


def test_every_row_of_a_share_of_one_continues_without_end(recipe_of: Recipes, tmp_path: Path) -> None:
    train(recipe_of("training.state_passing=1.0", "text.validation.fraction=0.5"), tmp_path / "run")
    state = read.read_training(read.find(tmp_path / "run"))
    (position,) = (x for name, x in state.items() if name.startswith("carried.") and x.dtype == torch.int64)
    assert (position > 64).any(), "but where a document has begun since"


@pytest.mark.parametrize(
    "options",
    [
        ["model.attention.kind=softmax"],
        ["text.rows=documents"],
        ["objective=masked", "model.attention.kind=full"],
        ["model.attention.feature_map=favor", "model.attention.favor.resample_every=5"],
    ],
)
def test_what_has_no_state_to_pass_is_refused(recipe_of: Recipes, options: list[str]) -> None:
    with pytest.raises(RecipeError, match=r"training\.state_passing"):
        recipe_of(HALF, *options)


# --- what the output layer has learned while it read


def test_the_last_share_of_the_steps_learns(recipe_of: Recipes, trained: Path, tmp_path: Path) -> None:
    """With weights that do not move, the loss is that of the rows read by hand."""
    still = [f"training.init_from={trained}", "training.learning_rate=1e-30", "training.steps=6"]
    recipe = recipe_of(*still, "training.learn=0.5")
    train(recipe, tmp_path / "run")
    setup = prepare_run(recipe, read.find(trained, BEST))
    assert isinstance(setup.model, LanguageModel)
    expected, plain = [], []
    for number in range(6):
        tokens, targets, starts = batch_tensors(setup.data.training().batch(number))
        with torch.no_grad():
            nats = [loss(setup.model, tokens, targets, starts)[0] for loss in (text_loss, loss_while_learning)]
        plain.append(float(nats[0] / (targets != IGNORED).sum()))
        expected.append(float(nats[number >= 3] / (targets != IGNORED).sum()))
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-5)
    assert all(abs(a - b) > 1e-3 for a, b in zip(plain[3:], expected[3:], strict=True))
