"""Files written before must be read for ever, or be refused by a new version of their format."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import lmlong
from lmlong.checkpoint import manifest
from lmlong.data import token_dataset
from lmlong.data.token_file import read_tokens
from lmlong.data.tokenizers import load_tokenizer
from lmlong.errors import CheckpointError, UsageError
from lmlong.io import folder_manifest
from lmlong.recipe import file as recipe_file
from lmlong.training.resume import resume_point
from lmlong.training.run import train

GOLDEN = Path(__file__).parent / "golden"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())


def test_old_checkpoint_and_state_continue_the_same_text() -> None:
    manifest.verify(GOLDEN / "checkpoint", manifest.START)
    model = lmlong.load(GOLDEN / "checkpoint", "cpu")
    session = model.load_state(GOLDEN / "text.state")
    assert "".join(model.stream("", state=session, max_tokens=20, temperature=1.0)) == EXPECTED["continuation"]


def test_old_run_is_a_start_but_is_not_resumed(tmp_path: Path) -> None:
    """Its training state would have to be unpickled."""
    run, book = tmp_path / "run", tmp_path / "book.txt"
    checkpoint = shutil.copytree(GOLDEN / "checkpoint", run / "checkpoints" / "step-00000004")
    for resume in ("auto", str(run)):
        with pytest.raises(UsageError, match=r"^.*by an earlier version\. Start .* training\.init_from=.*$"):
            resume_point(run, resume)
    book.write_text("to be or not to be " * 50)
    new = [f"text.sources=[{{kind: files, paths: [{book}]}}]", "training.steps=1"]
    recipe = str(checkpoint / manifest.RECIPE)
    assert train(recipe_file.load(recipe, [*new, f"training.init_from={run}"]), tmp_path / "new").step == 1
    assert train(recipe_file.load(recipe, new), run, overwrite=True).step == 1


def test_old_token_folder_has_the_same_tokens() -> None:
    folder_manifest.verify(GOLDEN / "tokens", token_dataset.FORMAT)
    tokenizer = load_tokenizer(GOLDEN / "tokens" / "tokenizer.model")
    found = read_tokens(GOLDEN / "tokens" / "train-0.tokens", tokenizer)
    assert np.asarray(found.tokens[:40]).tolist() == EXPECTED["train"]
    assert len(found.starts) == EXPECTED["documents"]


def test_older_format_is_refused_with_a_remedy(tmp_path: Path) -> None:
    for file in (GOLDEN / "checkpoint").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    about = (tmp_path / manifest.NAME).read_text()
    (tmp_path / manifest.NAME).write_text(about.replace(f'"format": {manifest.FORMAT.version}', '"format": 2'))
    with pytest.raises(CheckpointError, match=r"format 2 was written by an older lmlong.*Train again") as refused:
        lmlong.load(tmp_path, "cpu")
    assert refused.value.exit_code == 4
