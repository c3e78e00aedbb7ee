"""Hidden states of a text: those of the model, whole or in pieces, after bos or after a state."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import predict, stirred
from torch import nn

from lmlong.attention.device_policy import CPU_POLICY, GPU_POLICY, DevicePolicy, use_policy
from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.errors import UsageError
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.session import PREFILL_TOKENS
from lmlong.model.language_model import LanguageModel
from lmlong.recipe import Downsample, Model, Recipe, Training

ModelOf = Callable[[str], LanguageModel]
TEXT = "It was a dark and stormy night. " * 150  # more than two pieces of bytes


def loaded(model: LanguageModel) -> TrainedLanguageModel:
    return TrainedLanguageModel(model, ByteTokenizer(), Recipe(training=Training(steps=1)), Path())


def after_each_block(model: LanguageModel, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The definition, from the module's own parts: what each block is given next, found by running fewer blocks."""
    seen = []
    for layers in range(1, len(model.blocks) + 1):
        every, model.blocks = model.blocks, model.blocks[:layers]  # type: ignore[assignment]
        norm, model.norm = model.norm, nn.Identity()  # type: ignore[assignment]
        seen.append(model(tokens)[0][0].detach())
        model.blocks, model.norm = every, norm
    return seen


@pytest.mark.parametrize("kind", ["linear", "window", "softmax"])
def test_hidden_states_are_those_of_the_model_and_after_a_state(model_of: ModelOf, kind: str) -> None:
    model = loaded(model_of(kind))
    text = TEXT[:100]
    ids = torch.tensor([model.tokenizer.bos, *model.tokenizer.encode(text)])
    hidden = model.hidden_states(text, blocks=True)
    assert torch.equal(hidden.tokens, ids)
    assert torch.equal(hidden.last, model.model(ids[None])[0][0])
    assert torch.equal(model.model.logits(hidden.last), predict(model.model, ids[None])[0][0])
    assert all(map(torch.equal, hidden.blocks, after_each_block(model.model, ids[None])))
    assert model.hidden_states(text).blocks == ()
    assert torch.equal(model.hidden_states(ids).last, hidden.last), "ids are read as they are"
    state = model.read(text[:50])
    for rest in (text[50:], ids[51:]):
        after = model.hidden_states(rest, state, blocks=True)
        assert torch.equal(after.tokens, ids[50:])
        for found, expected in zip([after.last, *after.blocks], [hidden.last, *hidden.blocks], strict=True):
            assert torch.allclose(found, expected[50:], rtol=1e-9)


def test_pieces_are_those_of_the_whole(model_of: ModelOf) -> None:
    model = loaded(model_of("linear"))
    ids = torch.tensor([model.tokenizer.bos, *model.tokenizer.encode(TEXT)])
    pieces = list(model.stream_hidden_states(TEXT, blocks=True))
    assert [len(piece.tokens) for piece in pieces] == [PREFILL_TOKENS, PREFILL_TOKENS, len(ids) - 2 * PREFILL_TOKENS]
    whole = model.hidden_states(TEXT, blocks=True)
    assert torch.equal(torch.cat([piece.tokens for piece in pieces]), ids)
    truth = [model.model(ids[None])[0][0], *after_each_block(model.model, ids[None])]
    for found, expected in zip([whole.last, *whole.blocks], truth, strict=True):
        assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("policy", [CPU_POLICY, GPU_POLICY], ids=["CPU", "GPU"])
def test_layers_that_read_blocks_of_tokens_have_a_row_for_each_block(policy: DevicePolicy) -> None:
    options = Model(width=16, layers=4, heads=2, downsample=Downsample(factor=4))
    model = loaded(stirred(LanguageModel(options, 258)).double().eval())
    use_policy(model.model, policy)
    hidden = model.hidden_states("abcdefghi", blocks=True)  # 10 tokens with bos
    assert [len(after) for after in hidden.blocks] == [10, 2, 2, 10]
    assert [len(after) for after in model.hidden_states("a", blocks=True).blocks] == [2, 0, 0, 2]


def test_ids_of_another_shape_are_refused(model_of: ModelOf) -> None:
    for shape in ((0,), (1, 5)):
        with pytest.raises(UsageError, match=r"^text: ids of shape .* Give the ids of one text"):
            loaded(model_of("linear")).hidden_states(torch.zeros(shape, dtype=torch.long))
