"""Weights that are finite and yet too large: each command names the layer, and ends as with a damaged checkpoint."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from interop.exported import FORMS, write_run
from serving.servers import served

import lmlong
from lmlong.checkpoint import write
from lmlong.cli.evaluate import eval_
from lmlong.cli.generate import generate
from lmlong.cli.score import score
from lmlong.errors import CheckpointError

LAYERS = {
    "embedding.weight": "blocks.0.mixer.norm",
    "blocks.1.mlp.in_proj.weight": "blocks.1.mlp",
    "ngram_embedding.table": "ngram_embedding",
}
"""The first layer of which an output is not finite, by the weight that is too large."""


@pytest.fixture(params=LAYERS)
def weight(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def run(tmp_path: Path, weight: str) -> Path:
    """A run, one of whose weights is near the largest number."""
    model = write_run(tmp_path / "run", **FORMS["tables"])
    weights = model.state_dict()
    weights[weight].fill_(3e38)
    folder = tmp_path / "run" / "checkpoints" / "step-00000001"
    recipe, tokenizer = (folder / "recipe.yaml").read_text(), (folder / "tokenizer.model").read_bytes()
    write.write(folder, write.Contents(weights, {"step": 1}, recipe, tokenizer, 1, 1.5, 12345))
    return tmp_path / "run"


def test_commands_name_the_layer(run: Path, weight: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be " * 30)
    commands: list[tuple[Any, list[str]]] = [
        (score, [str(run), str(tmp_path / "text.txt")]),
        (eval_, [str(run), "--data", str(tmp_path / "text.txt"), "--lengths", "8", "--min-documents", "1"]),
        (generate, [str(run), "--prompt", "to be"]),
        (generate, [str(run), "--prompt", ""]),
    ]
    for command, words in commands:
        done = CliRunner().invoke(command, words)
        assert isinstance(done.exception, CheckpointError), (words, done.output, done.exception)
        assert f"The output of {LAYERS[weight]}" in str(done.exception), words


def test_a_server_names_the_layer_and_lives(run: Path, weight: str) -> None:
    with served(lmlong.load(run)) as server:
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
