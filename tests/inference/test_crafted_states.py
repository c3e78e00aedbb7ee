"""State files with changed tensors and a digest that is right: refused, or a text, and nothing else.

What a number stands for, and many more of them: `tools/fuzz.py crafted-states --cases 1 --seed NUMBER`.
"""

from pathlib import Path

import pytest
import torch
from crafted_values import write_state
from inference.crafted_states import Case, prepare, try_crafted
from machine import needs_native

from lmlong.attention.ngram.hashing import NO_NGRAM
from lmlong.decode.engine import step
from lmlong.errors import CheckpointError

USUAL = 60


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return prepare(tmp_path_factory.mktemp("models"))


def test_the_first_crafted_states(cases: dict[str, Case], tmp_path: Path) -> None:
    tried = {number: try_crafted(number, cases, tmp_path / "crafted.state") for number in range(USUAL)}
    assert {number: found for number, found in tried.items() if found[1]} == {}
    assert {"refused", "text"} <= {what for what, _ in tried.values()}


def refusal(case: Case, file: Path, changes: dict[str, torch.Tensor]) -> str:
    """Return why a state with other tensors is refused; a name may be the end of its path."""
    tensors = dict(case.tensors)
    for name, x in changes.items():
        (path,) = [each for each in case.tensors if each == name or each.endswith(f".{name}")]
        tensors[path] = x
    write_state(file, case.about, tensors)
    with pytest.raises(CheckpointError) as caught:
        case.model.load_state(file)
    return str(caught.value)


def ngrams(length: int, value: int) -> torch.Tensor:
    hashes = torch.full((1, 2, length), NO_NGRAM)
    hashes[0, 1, -1] = value
    return hashes


def ones(length: int, value: int) -> torch.Tensor:
    return torch.full((1, length), value, dtype=torch.int16)


LETTER = ord("a") + 1
REFUSALS: list[tuple[str, dict[str, torch.Tensor], str]] = [
    *(
        ("ngram", {name: ngrams(length, value)}, f"blocks.1.attention.{name} holds {value}, which is not from -1 to")
        for name, length in (("waiting_ngram", 1024), ("recent_ngram", 32))
        for value in (2**62, -2)
    ),
    ("window of one", {"blocks.0.attention.k": torch.zeros(1, 2, 4, 8)}, "has the shape (1, 2, 4, 8), this model's is"),
    *(("window", {"recent": torch.full((1, 1024), value)}, f"recent holds {value}") for value in (-2, 259)),
    ("window", {"unread.pending": ones(20_000, LETTER)}, "unread is longer than 16384"),
    (
        "window",
        {"unread.pending": ones(600, LETTER), "unread.chosen": torch.full((1, 20_000), LETTER)},
        "unread.chosen has 20,000 tokens, which is more than 16,384",
    ),
]


@pytest.mark.parametrize(("kind", "changes", "message"), REFUSALS)
def test_a_state_that_no_text_gives_is_refused(
    cases: dict[str, Case], tmp_path: Path, kind: str, changes: dict[str, torch.Tensor], message: str
) -> None:
    assert message in refusal(cases[kind], tmp_path / "a.state", changes)


def test_learned_weights_are_read_in_the_dtype_of_the_model(cases: dict[str, Case], tmp_path: Path) -> None:
    case, texts = cases["learned"], []
    for dtype in (torch.float32, torch.float64):
        tensors = {
            name: x.to(dtype) if ".learned." in name and x.is_floating_point() else x
            for name, x in case.tensors.items()
        }
        write_state(tmp_path / "a.state", case.about, tensors)
        texts.append("".join(case.model.stream("and", state=case.model.load_state(tmp_path / "a.state"), max_tokens=9)))
    assert texts[0] == texts[1]


def test_keys_values_and_marks_of_other_lengths(cases: dict[str, Case], tmp_path: Path) -> None:
    name = "blocks.0.attention.settled.k"
    settled = cases["softmax"].tensors[f"state.{name}"]
    why = refusal(cases["softmax"], tmp_path / "a.state", {name: settled[:, :, :-1].clone()})
    assert "settled.current has" in why and "but there are" in why


@needs_native
def test_native_code_refuses_a_row_outside_its_table(cases: dict[str, Case]) -> None:
    """Even if the state was not checked before."""
    model = cases["ngram"].model.model
    state = model.init_state(1)
    attention = state.blocks[1].attention
    attention.recent_ngram[..., -1] = 2**63 - 1
    with pytest.raises(IndexError, match="has no row of the table"):
        model.settle(state)


@needs_native
@pytest.mark.parametrize("token", [-1, 10**6])
def test_native_decoding_refuses_a_token_outside_the_vocabulary(cases: dict[str, Case], token: int) -> None:
    model = cases["window"].model.model
    with pytest.raises(IndexError, match="not in the vocabulary"):
        step(model, torch.tensor([token]), model.init_state(1))
