"""Texts of any number and length are classified as each would be alone."""

import warnings
from pathlib import Path

import pytest
import torch
from labelled import KINDS, label_recipe
from models import save_run, stirred

from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.errors import LmlongError
from lmlong.inference import classify
from lmlong.inference.classify import TrainedClassifier
from lmlong.inference.loading import load_classifier
from lmlong.model.build import build
from lmlong.model.language_model import PIECE

NAMES = ["no", "yes", "other"]


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> TrainedClassifier:
    """A run with three labels and all its weights drawn."""
    chosen = label_recipe(tmp_path, request.param, **{"text.labels.names": NAMES})
    torch.manual_seed(0)
    save_run(tmp_path / "run", chosen, stirred(build(chosen, 258), 0.3), ByteTokenizer())
    return load_classifier(tmp_path / "run", "cpu")


def alone(model: TrainedClassifier, tokens: list[int]) -> dict[str, float]:
    """The probabilities by the definition: the mean of an encoder's hidden states, or a causal model's last one."""
    with torch.no_grad():
        hidden, _ = model.model(torch.tensor([tokens]))
        chosen = hidden[0].mean(0) if model.recipe.is_encoder else hidden[0, -1]
        logits = (model.model.lm_head.weight @ chosen).double()
    return dict(zip(NAMES, logits.softmax(-1).tolist(), strict=True))


@pytest.mark.parametrize("model", KINDS, indirect=True)
def test_a_batch_gives_each_text_what_it_gets_alone(model: TrainedClassifier, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["", "a", "abc" * 4, "b", "hello", "a b c d", "xyz"]
    for most in (64, 3):
        monkeypatch.setattr(classify, "MAX_ROWS", most)
        found = model.classify_all(texts)
        for text, each in zip(texts, found, strict=True):
            wanted = alone(model, model.tokens_of(text))
            assert each.probabilities == pytest.approx(wanted, abs=1e-5) and sum(wanted.values()) == pytest.approx(1)
            assert each.label == max(wanted, key=wanted.__getitem__) and each.tokens == each.read == len(text) + 2
    assert len({round(each.probabilities["yes"], 3) for each in found}) > 4 and model.labels == NAMES
    assert model.classify("hello").probabilities == pytest.approx(found[4].probabilities, abs=1e-5)
    assert model.classify_all([]) == []


@pytest.mark.parametrize("model", ["causal", "softmax", "downsampled"], indirect=True)
def test_a_causal_model_reads_long_texts_in_pieces(model: TrainedClassifier) -> None:
    lengths = (2 * PIECE + 17, PIECE - 2, PIECE - 1, 3)  # longer than pieces, one piece exactly, one token more
    texts = [("abcdefg" * (length // 7 + 1))[:length] for length in lengths]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = model.classify_all(texts)
    for text, each in zip(texts, found, strict=True):
        assert each.probabilities == pytest.approx(alone(model, model.tokens_of(text)), abs=1e-3)
        assert each.read == each.tokens == len(text) + 2


@pytest.mark.parametrize("model", ["encoder", "linear encoder"], indirect=True)
def test_an_encoder_reads_the_beginning_of_a_long_text_and_warns(model: TrainedClassifier) -> None:
    with pytest.warns(UserWarning, match=r"^1 of 2 texts cut to 16 tokens, as in training$"):
        short, long = model.classify_all(["a" * 14, "b" * 15])
    assert (short.read, short.tokens, long.read, long.tokens) == (16, 16, 16, 17)
    cut = model.tokens_of("b" * 14)
    assert len(cut) == 16 and long.probabilities == pytest.approx(alone(model, cut), abs=1e-5)


@pytest.mark.parametrize("model", ["causal"], indirect=True)
def test_values_that_are_not_finite_are_an_error(model: TrainedClassifier) -> None:
    with torch.no_grad():
        model.model.norm.weight.fill_(float("inf"))
    with pytest.raises(LmlongError, match="finite"):
        model.classify("abc")
