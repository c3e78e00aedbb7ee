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


@needs_weights
@pytest.mark.interop
def test_smollm2_has_the_logits_and_the_tokens_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=SMOLLM2.name, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER, gguf_file=SMOLLM2.name)
    import_model(SMOLLM2, tmp_path / "smollm2")
    model = lmlong.load(tmp_path / "smollm2")
    tokens = [model.tokenizer.bos, *model.tokenizer.encode(BOOK)]
    assert tokenizer.encode(BOOK, add_special_tokens=False) == tokens[1:]
    with torch.inference_mode():
        expected = reference.eval()(torch.tensor([tokens])).logits[0]
    for found in tiny_llama.read_both_ways(model.model, tokens):
        assert float((found - expected).norm() / expected.norm()) < 1e-4
        assert float(torch.nn.functional.cross_entropy(found[:-1], torch.tensor(tokens[1:]))) < 3.5
