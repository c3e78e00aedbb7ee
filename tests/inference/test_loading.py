"""A run on disk becomes a model that writes."""

from itertools import islice
from pathlib import Path

import pytest
import torch
from models import predict
from safetensors.torch import load_file

from lmlong.checkpoint.write import Contents, write
from lmlong.errors import CheckpointError, UsageError
from lmlong.inference.loading import load
from lmlong.recipe import file as recipe_file


def test_the_loaded_weights_are_those_of_the_checkpoint(run: Path) -> None:
    loaded = load(run, "cpu")
    weights = load_file(loaded.checkpoint / "model.safetensors")
    assert loaded.model.state_dict().keys() == weights.keys()
    assert all(torch.equal(loaded.model.state_dict()[name], weights[name]) for name in weights)
    assert not loaded.model.training
    assert loaded.checkpoint == run.resolve() / "checkpoints" / "step-00000001"


@pytest.mark.parametrize("prompt", ["", "naïve "])
def test_a_text_begins_with_bos_and_then_the_prompt(run: Path, prompt: str) -> None:
    loaded = load(run, "cpu")
    tokens = [loaded.tokenizer.bos, *loaded.tokenizer.encode(prompt)]
    for _ in range(10):
        with torch.no_grad():
            tokens.append(int(predict(loaded.model, torch.tensor([tokens]))[0][0, -1].argmax()))
    written = "".join(loaded.stream(prompt, temperature=0, max_tokens=10))
    assert written == loaded.tokenizer.decode(tokens[-10:])


def test_max_tokens_none_has_no_end(run: Path) -> None:
    loaded = load(run, "cpu")
    pieces = list(islice(loaded.stream(temperature=0, max_tokens=None), 300))
    assert len(pieces) == 300
    assert "".join(pieces).startswith("".join(loaded.stream(temperature=0))[:-1])  # the last may be half a character


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": -2}, "max_tokens: -2"),
        ({"stop": "END"}, "stop: 'END'"),
        ({"stop": [""]}, "stop: "),
        ({"top_p": 0}, "top_p: 0"),
    ],
)
def test_options_are_refused_before_the_first_token(run: Path, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load(run, "cpu").stream("a", **options)


def test_a_gpu_that_is_not_there_is_a_usage_error(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # hidden, where there is one
    with pytest.raises(UsageError, match="no GPU"):
        load(run, "cuda")
    assert load(run).model.embedding.weight.device.type == "cpu"


def test_weights_of_another_vocabulary_are_refused(run: Path, tmp_path: Path) -> None:
    loaded = load(run, "cpu")
    weights = loaded.model.state_dict()
    weights["embedding.weight"] = weights["embedding.weight"][:100]
    other = tmp_path / "other"
    tokenizer = (loaded.checkpoint / "tokenizer.model").read_bytes()
    write(other, Contents(weights, {}, recipe_file.dump(loaded.recipe), tokenizer))
    with pytest.raises(
        CheckpointError, match=r"embedding\.weight has shape \(100, 16\), but the recipe's model has \(258, 16\)"
    ):
        load(other, "cpu")
