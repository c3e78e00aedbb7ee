"""State files with changed tensors and a digest that is right: refused, or a text, and nothing else.

What a number stands for, and many more of them: `tools/fuzz_files.py --kind states --files 1 --seed NUMBER`.
"""

import json
from pathlib import Path

import pytest
import torch
from inference.crafted_states import Case, prepare, try_crafted
from machine import needs_compiler
from safetensors.torch import save_file

from lmlong.attention.ngram.hashing import NO_NGRAM
from lmlong.errors import CheckpointError
from lmlong.inference import state_file

USUAL = 100


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return prepare(tmp_path_factory.mktemp("models"))


def test_the_first_crafted_states(cases: dict[str, Case], tmp_path: Path) -> None:
    tried = {number: try_crafted(number, cases, tmp_path / "crafted.state") for number in range(USUAL)}
    assert {number: found for number, found in tried.items() if found[1]} == {}
    assert {"refused", "text"} <= {what for what, _ in tried.values()}


def refusal(case: Case, file: Path, **changes: torch.Tensor) -> str:
    """Return why a state with other tensors is refused; a name may be the end of its path."""
    tensors = dict(case.tensors)
    for name, x in changes.items():
        path = name.replace("__", ".")
        (found,) = [each for each in case.tensors if each == path or each.endswith(f".{path}")]
        tensors[found] = x
    about = {name: value for name, value in case.about.items() if name != "sha256"}
    save_file(tensors, file, {"lmlong": json.dumps({**about, "sha256": state_file._digest(about, tensors)})})
    with pytest.raises(CheckpointError) as caught:
        case.model.load_state(file)
    return str(caught.value)


@pytest.mark.parametrize("value", [2**63 - 1, 2**62, -2, -(2**63)])
@pytest.mark.parametrize("name", ["waiting_ngram", "recent_ngram"])
def test_a_hash_that_has_no_row(cases: dict[str, Case], tmp_path: Path, name: str, value: int) -> None:
    ngrams = torch.full((1, 2, 1024 if name == "waiting_ngram" else 32), NO_NGRAM)
    ngrams[0, 1, -1] = value
    why = refusal(cases["ngram"], tmp_path / "a.state", **{name: ngrams})
    assert f"blocks.1.attention.{name} holds {value}, which is not from -1 to {2**62 - 1}" in why


def test_keys_values_and_marks_of_other_lengths(cases: dict[str, Case], tmp_path: Path) -> None:
    settled = cases["softmax"].tensors["state.blocks.0.attention.settled.k"]
    why = refusal(cases["softmax"], tmp_path / "a.state", blocks__0__attention__settled__k=settled[:, :, :-1].clone())
    assert "settled.current has" in why and "but there are" in why


def test_a_window_of_one_keeps_nothing(cases: dict[str, Case], tmp_path: Path) -> None:
    why = refusal(cases["window of one"], tmp_path / "a.state", blocks__0__attention__k=torch.zeros(1, 2, 4, 8))
    assert "state.blocks.0.attention.k has the shape (1, 2, 4, 8), this model's is (1, 2, 0, 8)" in why


@pytest.mark.parametrize("recent", [-2, 259, 10**6])
def test_recent_tokens_outside_the_vocabulary(cases: dict[str, Case], tmp_path: Path, recent: int) -> None:
    tokens = cases["window"].tensors["recent"].clone()
    tokens[0, -5] = recent
    assert f"recent holds {recent}, which is not from -1" in refusal(
        cases["window"], tmp_path / "a.state", recent=tokens
    )


def test_unread_text_of_more_than_a_part(cases: dict[str, Case], tmp_path: Path) -> None:
    pending = torch.full((1, 20_000), ord("a") + 1, dtype=torch.int16)
    assert "unread is longer than 16384" in refusal(cases["window"], tmp_path / "a.state", unread__pending=pending)


def test_many_tokens_of_unread_text(cases: dict[str, Case], tmp_path: Path) -> None:
    pending = torch.full((1, 600), ord("a") + 1, dtype=torch.int16)
    changes = {"unread__pending": pending, "unread__chosen": torch.full((1, 20_000), ord("a") + 1)}
    assert "unread.chosen has 20,000 tokens, which is more than 16,384" in refusal(
        cases["window"], tmp_path / "a.state", **changes
    )


@needs_compiler
def test_native_code_refuses_a_row_outside_its_table(cases: dict[str, Case]) -> None:
    """Even if the state was not checked before."""
    model = cases["ngram"].model.model
    state = model.init_state(1)
    attention = state.blocks[1].attention
    attention.recent_ngram[..., -1] = 2**63 - 1
    with pytest.raises(IndexError, match="has no row of the table"):
        model.settle(state)


@needs_compiler
@pytest.mark.parametrize("token", [-1, 10**6])
def test_native_decoding_refuses_a_token_outside_the_vocabulary(cases: dict[str, Case], token: int) -> None:
    model = cases["window"].model.model
    with pytest.raises(IndexError, match="not in the vocabulary"):
        model.step(torch.tensor([token]), model.init_state(1))
