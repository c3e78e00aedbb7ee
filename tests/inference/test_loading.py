"""A run on disk becomes a model that writes."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from machine import needs_native
from safetensors.torch import load_file

from lmlong.checkpoint.write import Contents, write
from lmlong.decode import native
from lmlong.decode.choice import why_no_fast_engine
from lmlong.decode.engine import EagerEngine
from lmlong.errors import CheckpointError, UsageError
from lmlong.inference.loading import load
from lmlong.model.language_model import LanguageModel
from lmlong.native import prebuilt
from lmlong.native.build import CHOICE
from lmlong.recipe import file as recipe_file

from .conftest import tiny


def test_the_loaded_weights_are_those_of_the_checkpoint(run: Path) -> None:
    loaded = load(run, "cpu")
    weights = load_file(loaded.checkpoint / "model.safetensors")
    assert loaded.model.state_dict().keys() == weights.keys()
    assert all(torch.equal(loaded.model.state_dict()[name], weights[name]) for name in weights)
    assert not loaded.model.training
    assert loaded.checkpoint == run.resolve() / "checkpoints" / "step-00000001"


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


@needs_native
def test_a_model_decodes_by_native_code_which_is_packed_again_when_weights_change(run: Path) -> None:
    model = load(run, "cpu")
    engines = []
    for _ in range(2):
        for _ in range(2):
            list(model.stream("a", max_tokens=1))
            engines.append(model.model.engine)
        with torch.no_grad():
            model.model.norm.weight.mul_(2.0)
    assert all(isinstance(engine, native.NativeEngine) for engine in engines)
    assert engines[0] is engines[1] is not engines[2] is engines[3]


@pytest.fixture
def no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without a compiler and prebuilt code."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "none")
    monkeypatch.delenv(CHOICE, raising=False)
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "prebuilt")
    native.library.cache_clear()
    yield
    native.library.cache_clear()


def test_without_a_compiler_torch_writes(run: Path, no_library: None) -> None:
    loaded = load(run, "cpu")
    with pytest.raises(UsageError, match=r"needs a C\+\+ compiler"):
        loaded.use_fast_engine()
    assert "".join(loaded.stream("a", max_tokens=2, temperature=0))
    assert isinstance(loaded.model.engine, EagerEngine)


@pytest.mark.gpu
def test_a_step_that_is_never_the_same_is_no_graph() -> None:
    model = LanguageModel(tiny("softmax"), 30).eval().cuda()
    assert "grows" in str(why_no_fast_engine(model))
