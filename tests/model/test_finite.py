"""Weights that are finite and yet too large: each command names the layer, and ends as with a damaged checkpoint."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from models import FORMS, model_of, save_run
from serving.servers import served

import lmlong
from lmlong import recipe
from lmlong.cli.evaluate import eval_
from lmlong.cli.generate import generate
from lmlong.cli.score import score
from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.errors import CheckpointError

LAYERS = {
    "embedding.weight": "blocks.0.mixer.norm",
    "blocks.1.mlp.in_proj.weight": "blocks.1.mlp",
    "ngram_embedding.table": "ngram_embedding",
}
"""The first layer of which an output is not finite, by the weight that is too large."""


def unusable(folder: Path, weight: str) -> Path:
    """Write a run, one of whose weights is near the largest number."""
    options = {"width": 32, "layers": 2, "heads": 4, **FORMS["tables"]}
    model = model_of("tables")
    model.state_dict()[weight].fill_(3e38)
    chosen = recipe.Recipe(model=recipe.Model(**options), training=recipe.Training(steps=1), text=recipe.Text())
    return save_run(folder, chosen, model, ByteTokenizer())


@pytest.mark.parametrize("weight", LAYERS)
def test_commands_name_the_layer(weight: str, tmp_path: Path) -> None:
    run = unusable(tmp_path / "run", weight)
    (tmp_path / "text.txt").write_text("to be or not to be " * 30)
    commands: list[tuple[Any, list[str]]] = [
        (score, [str(run), str(tmp_path / "text.txt")]),
        (eval_, [str(run), "--data", str(tmp_path / "text.txt"), "--lengths", "8", "--min-documents", "1"]),
        (generate, [str(run), "--prompt", "to be"]),
        (generate, [str(run), "--prompt", ""]),
    ]
    for command, words in commands if weight == "embedding.weight" else commands[:1]:
        done = CliRunner().invoke(command, words)
        assert isinstance(done.exception, CheckpointError), (words, done.output, done.exception)
        assert f"The output of {LAYERS[weight]}" in str(done.exception), words


def test_a_server_names_the_layer_and_answers_on(tmp_path: Path) -> None:
    weight = "blocks.1.mlp.in_proj.weight"
    with served(lmlong.load(unusable(tmp_path / "run", weight))) as server:
        for path, body in (
            ("/v1/completions", {"prompt": "to be"}),
            ("/v1/completions", {"prompt": ""}),
            ("/v1/score", {"text": "to be"}),
            ("/v1/sessions", {"text": "to be"}),
        ):
            answer = server.client.post(path, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (503, "model_unusable"), (path, answer.text)
            assert f"The output of {LAYERS[weight]}" in error["message"]
