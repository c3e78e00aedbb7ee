"""State files of large tables: of a short text they hold little, and give back every bit."""

from pathlib import Path

import pytest
import torch
from models import stirred

from lmlong import recipe
from lmlong.attention.base import state_tensors
from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.inference import sparse, state_file
from lmlong.inference.session import append_token, next_logits, prefill
from lmlong.model.language_model import LanguageModel


@pytest.fixture
def model() -> LanguageModel:
    torch.manual_seed(0)
    options = recipe.Model(width=16, layers=2, heads=2, attention=recipe.Attention(kind=["ngram", "linear"]))
    return stirred(LanguageModel(options, 258), 0.3).eval()


def test_a_short_text_makes_a_small_file(model: LanguageModel, tmp_path: Path) -> None:
    tokenizer, path = ByteTokenizer(), tmp_path / "text.state"
    text = tokenizer.encode("to be or not to be, that is the question " * 3)
    session = prefill(model, [text])
    for _ in range(3):  # values that are not in a table yet
        _, state = next_logits(model, session)
        session = append_token(session, state, 101)
    belongs = state_file.owners(model, tokenizer, "")
    state_file.save(path, session, model, belongs, tokenizer, "run")
    again = state_file.load(path, model, belongs, tokenizer, "run")
    settled = session._replace(state=model.settle(session.state))
    assert all(map(torch.equal, state_tensors(again), state_tensors(settled)))
    assert path.stat().st_size < sum(x.nbytes for x in state_tensors(session)) / 20


def test_only_rows_that_differ_from_an_empty_state_are_stored() -> None:
    empty = {"table": torch.zeros(1, 2, 3000, 4), "names": torch.full((1, 2, 3000), -1), "few": torch.zeros(5)}
    tensors = {name: x.clone() for name, x in empty.items()}
    tensors["table"][0, 1, 7] = torch.tensor([1.0, 0.0, -0.0, torch.nan])
    tensors["table"][0, 0, 9] = -0.0
    tensors["names"][0, 0, 2999] = 5
    kept = sparse.pack(tensors, empty)
    assert sum(x.numel() for x in kept.values()) < 20
    for name, x in sparse.unpack(kept, empty).items():
        assert torch.equal(x.view(torch.uint8), tensors[name].view(torch.uint8)), "to the bit"
    full = {**tensors, "table": torch.ones(1, 2, 3000, 4)}
    assert sparse.pack(full, empty)["table"] is full["table"]


@pytest.mark.parametrize(
    "places", [torch.tensor([-1]), torch.tensor([6000]), torch.tensor([0.5]), torch.zeros(1, 1, dtype=torch.long)]
)
def test_invalid_indices_are_refused(places: torch.Tensor) -> None:
    empty = {"table": torch.zeros(1, 2, 3000, 4)}
    with pytest.raises(ValueError, match="table"):
        sparse.unpack({"table.sparse_places": places, "table.sparse_rows": torch.ones(1, 4)}, empty)
