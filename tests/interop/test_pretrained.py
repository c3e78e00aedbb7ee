"""A real pretrained model. Run with LMLONG_PRETRAINED=$(tools/pretrained FOLDER) pytest -m pretrained."""

import os
from pathlib import Path

import pytest
import torch
from interop import tiny_llama

import lmlong
from lmlong.interop.importing import import_model

pytestmark = pytest.mark.pretrained

FOLDER = Path(os.environ.get("LMLONG_PRETRAINED", ""))
SMOLLM2 = FOLDER / "SmolLM2-135M-Instruct.gguf"
needs_weights = pytest.mark.skipif(not SMOLLM2.exists(), reason="needs LMLONG_PRETRAINED")

BOOK = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "
    "The ferry left at seven, and nobody on the quay had thought of a rope; 12 men and 3 dogs looked on.\n"
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    import_model(SMOLLM2, tmp_path / "smollm2")
    return tmp_path / "smollm2"


def logits(run: Path, text: str) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Return the tokens of a document, and the logits after each, read at once and token by token."""
    model = lmlong.load(run)
    tokens = [model.tokenizer.bos, *model.tokenizer.encode(text)]
    return tokens, *tiny_llama.read_both_ways(model.model, tokens)


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def nats(found: torch.Tensor, tokens: list[int]) -> float:
    return float(torch.nn.functional.cross_entropy(found[:-1], torch.tensor(tokens[1:])))


@needs_weights
@pytest.mark.interop
def test_smollm2_has_the_logits_and_the_tokens_of_transformers(run: Path) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=SMOLLM2.name, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER, gguf_file=SMOLLM2.name)
    tokens, at_once, steps = logits(run, BOOK)
    assert tokenizer.encode(BOOK, add_special_tokens=False) == tokens[1:]
    with torch.inference_mode():
        expected = reference.eval()(torch.tensor([tokens])).logits[0]
    assert apart(at_once, expected) < 1e-4 and apart(steps, expected) < 1e-4
    assert nats(at_once, tokens) < 3.5
