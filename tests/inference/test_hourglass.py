"""A model that reads blocks writes as every other does: in batches, and from files, in the middle of a block."""

from pathlib import Path

import pytest
import torch

from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.inference.loading import TrainedLanguageModel, load
from lmlong.inference.sampling import Sampling
from lmlong.inference.session import next_logits
from lmlong.model.state import concat_states
from lmlong.model.state_size import state_size
from lmlong.recipe import Attention, Downsample, Model

from .conftest import write_run

PROMPTS = ["", "a", "to be", "or not to be, "]


@pytest.fixture(scope="module", params=["linear", "softmax"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrainedLanguageModel:
    attention, downsample = Attention(kind=request.param), Downsample(factor=4, kind="conv")
    options = Model(width=16, layers=3, heads=2, attention=attention, downsample=downsample)
    return load(write_run(tmp_path_factory.mktemp("run"), ByteTokenizer(), "bytes", 0.5, options), "cpu")


def test_prompts_of_different_lengths_are_continued_as_if_alone(loaded: TrainedLanguageModel) -> None:
    together = concat_states([loaded.read(prompt) for prompt in PROMPTS])
    writing = loaded.generate(together, Sampling(temperature=0), [(0,)] * 4, 40)
    texts = ["", "", "", ""]
    for row, piece in writing:
        texts[row] += piece
    assert texts == ["".join(loaded.stream(prompt, max_tokens=40, temperature=0)) for prompt in PROMPTS]


def test_a_state_goes_through_a_file(loaded: TrainedLanguageModel, tmp_path: Path) -> None:
    for prompt in PROMPTS:
        session = loaded.read(prompt)
        loaded.save_state(session, tmp_path / "text.state")
        again = loaded.load_state(tmp_path / "text.state")
        assert again.state.hourglass is not None
        assert torch.equal(next_logits(loaded.model, again)[0], next_logits(loaded.model, session)[0])


def test_the_state_grows_only_where_its_attention_does(loaded: TrainedLanguageModel) -> None:
    growth = state_size(loaded.model).per_token.numbers
    per_key = 2 * 16 + 1
    softmax = loaded.recipe.model.attention.kind == "softmax"
    assert growth == (2 * per_key + per_key / 4 if softmax else 0) // 1
