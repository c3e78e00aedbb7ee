"""Memory in use does not grow with the text that is read, or with the steps of training."""

from itertools import count
from pathlib import Path
from typing import Any

import pytest
from allocations import ROUND, ROUNDS, assert_leaves_nothing, in_use, is_flat, with_mallinfo
from inference.conftest import prose
from machine import new_cache
from models import write_run
from serving import schedulers
from serving.servers import served
from training.conftest import write_tiny

import lmlong
from lmlong.inference.loading import TrainedLanguageModel, load
from lmlong.recipe import file as recipe_file
from lmlong.surprisal.stream import TextScore
from lmlong.training import module
from lmlong.training.run import train

pytestmark = with_mallinfo

TEXT = prose(2000)


@pytest.fixture(scope="module", params=["linear", "ngram"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrainedLanguageModel:
    run = tmp_path_factory.mktemp("run")
    write_run(run, deviation=1.0, width=16, heads=2, attention={"kind": request.param})
    return load(run, "cpu")


def part(number: int) -> str:
    """A text of one of several lengths, up to two pieces."""
    return TEXT[: 1500 - 187 * number]


def test_texts_are_read_and_measured_in_constant_memory(model: TrainedLanguageModel) -> None:
    score, session = TextScore(model), model.read([TEXT])

    def read_on(number: int) -> None:
        nonlocal session
        text = part(number)
        session = model.read([text], session)
        assert sum(unit.bits for unit in score.read(text.encode())) > 0
        lmlong.evaluate(model, texts=[text[-400:]] * 2, lengths=[16], min_documents=2)

    assert_leaves_nothing(read_on)


def test_server_takes_constant_memory() -> None:
    with served(schedulers.tiny("ngram", native=True)) as server:

        def ask(number: int) -> None:
            assert server.post("/v1/score", text=part(number)).status_code == 200
            assert server.texts(prompt=part(number), max_tokens=2)

        assert_leaves_nothing(ask)


class Flat(Exception):
    """A round of steps has kept no memory."""


def test_steps_take_constant_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loss, step, used = module.text_loss, count(), []

    def counted(*inputs: Any, **options: Any) -> Any:
        if next(step) % ROUND == 0:
            used.append(in_use())
            if is_flat(used):
                raise Flat
        return loss(*inputs, **options)

    monkeypatch.setattr(module, "text_loss", counted)
    monkeypatch.setenv("LMLONG_CACHE", str(new_cache(tmp_path)))
    options = (f"training.steps={ROUND * ROUNDS}", f"training.log_every={ROUND}", "model.width=16")
    with pytest.raises(Flat):
        train(recipe_file.load(write_tiny(tmp_path), options), tmp_path / "run")
