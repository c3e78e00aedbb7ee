"""Files written before must be read for ever, or be refused by a new version of their format."""

import json
from pathlib import Path

import numpy as np
import pytest

import lmlong
from lmlong.checkpoint import manifest
from lmlong.data import token_dataset
from lmlong.data.token_file import read_tokens
from lmlong.data.tokenizers.factory import load_tokenizer
from lmlong.errors import CheckpointError
from lmlong.io import folder_manifest

GOLDEN = Path(__file__).parent / "golden"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())


def test_a_checkpoint_and_a_state_go_on_with_the_same_text() -> None:
    manifest.verify(GOLDEN / "checkpoint")
    model = lmlong.load(GOLDEN / "checkpoint", "cpu")
    session = model.load_state(GOLDEN / "text.state")
    assert "".join(model.stream("", state=session, max_tokens=20, temperature=1.0)) == EXPECTED["continuation"]


def test_a_token_folder_holds_the_same_tokens() -> None:
    folder_manifest.verify(GOLDEN / "tokens", token_dataset.FORMAT)
    tokenizer = load_tokenizer(GOLDEN / "tokens" / "tokenizer.model")
    found = read_tokens(GOLDEN / "tokens" / "train-0.tokens", tokenizer)
    assert np.asarray(found.tokens[:40]).tolist() == EXPECTED["train"]
    assert len(found.starts) == EXPECTED["documents"]


def test_a_checkpoint_of_before_is_refused_with_what_to_do(tmp_path: Path) -> None:
    for file in (GOLDEN / "checkpoint").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    about = (tmp_path / manifest.NAME).read_text()
    (tmp_path / manifest.NAME).write_text(about.replace(f'"format": {manifest.FORMAT.version}', '"format": 2'))
    with pytest.raises(CheckpointError, match=r"format 2 was written by an older lmlong.*Train again") as refused:
        lmlong.load(tmp_path, "cpu")
    assert refused.value.exit_code == 4
