"""Real pretrained models. Run with LMLONG_PRETRAINED=$(tools/pretrained FOLDER) pytest -m pretrained."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from interop import tiny_llama

import lmlong
from lmlong.interop.importing import import_model, open_source

pytestmark = pytest.mark.pretrained

FOLDER = Path(os.environ.get("LMLONG_PRETRAINED", ""))
STORIES, SMOLLM2 = FOLDER / "stories15M.bin", FOLDER / "SmolLM2-135M-Instruct.gguf"
needs_weights = pytest.mark.skipif(not STORIES.exists() or not SMOLLM2.exists(), reason="needs LMLONG_PRETRAINED")

STORY = " Once upon a time, there was a little girl named Lily. She had a red ball, and her dog wanted to have it."
BOOK = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "
    "The ferry left at seven, and nobody on the quay had thought of a rope; 12 men and 3 dogs looked on.\n"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("pretrained")
    import_model(STORIES, folder / "stories")
    import_model(SMOLLM2, folder / "smollm2")
    yield folder
    shutil.rmtree(folder)


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
def test_stories_have_the_logits_of_the_formulas(runs: Path) -> None:
    source = open_source(STORIES)
    tokens, at_once, steps = logits(runs / "stories", STORY)
    given = {name: source.read(name) for name in source.shapes}
    expected = tiny_llama.logits(source.config.model_dump(), given, tokens)
    assert apart(at_once, expected) < 1e-5 and apart(steps, expected) < 1e-5
    assert nats(at_once, tokens) < 2.0


@needs_weights
def test_stories_tells_the_story_that_it_is_known_for(runs: Path) -> None:
    written = "".join(lmlong.load(runs / "stories").stream(" Once upon a time", temperature=0, max_tokens=20))
    assert written.startswith(", there was a little girl named Lily. She loved to play outside in the")


@needs_weights
@pytest.mark.interop
def test_smollm2_has_the_logits_and_the_tokens_of_transformers(runs: Path) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=SMOLLM2.name, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER, gguf_file=SMOLLM2.name)
    tokens, at_once, steps = logits(runs / "smollm2", BOOK)
    assert tokenizer.encode(BOOK, add_special_tokens=False) == tokens[1:]
    with torch.inference_mode():
        expected = reference.eval()(torch.tensor([tokens])).logits[0]
    assert apart(at_once, expected) < 1e-4 and apart(steps, expected) < 1e-4
    assert nats(at_once, tokens) < 3.5
