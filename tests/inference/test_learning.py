"""Sessions that learn from their text: what they learn is saved, forked and rewound with them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lmlong.attention.base import state_tensors
from lmlong.inference.loading import TrainedLanguageModel, load
from lmlong.inference.session import Session
from lmlong.model.sampling_options import Sampling
from lmlong.model.state import state_bytes

from .conftest import prose

TEXT = prose(120)


@pytest.fixture(scope="module")
def model(subword_run: Path) -> TrainedLanguageModel:
    return load(subword_run, "cpu", learn=True)


def learned_matrix(session: Session) -> Tensor:
    assert session.state.learned is not None
    return session.state.learned.delta.D


def test_what_is_learned_is_part_of_the_state(model: TrainedLanguageModel, subword_run: Path) -> None:
    session, plain = model.read(TEXT), load(subword_run, "cpu").read(TEXT)
    matrix = learned_matrix(session)
    assert matrix.abs().max() > 0 and plain.state.learned is None
    assert state_bytes(session) - state_bytes(plain) > matrix.nbytes
    assert model.read(TEXT, learn=False).state.learned is None
    assert load(subword_run, "cpu").read(TEXT, learn=True).state.learned is not None


def test_a_state_without_learning_begins_to_learn(
    model: TrainedLanguageModel, subword_run: Path, tmp_path: Path
) -> None:
    plain = load(subword_run, "cpu")
    plain.save_state(plain.read(TEXT), tmp_path / "plain.state")
    session = model.load_state(tmp_path / "plain.state")
    assert not learned_matrix(session).any()
    assert learned_matrix(model.read(TEXT, session)).any()


@pytest.mark.parametrize("fast", [False, True])
def test_generated_text_is_not_learned_from(subword_run: Path, fast: bool) -> None:
    """After all pairs of the prompt are learned, D stays the same."""
    model = load(subword_run, "cpu", learn=True)
    model.use_fast_engine(None if fast else False)
    generation = model.generate(model.read(TEXT, heal=False), Sampling(seed=1), [(0,)], 80)
    norms = [float(learned_matrix(generation.session).norm()) for _ in generation]
    assert len(norms) > 40 and len(set(norms[21:])) == 1  # the block of the prompt's end is over


def test_a_session_after_a_stop_string_has_learned_what_the_text_before_it_teaches(model: TrainedLanguageModel) -> None:
    session = model.read(TEXT)
    whole = "".join(model.stream("", state=session, max_tokens=60, seed=3))
    stop = whole[30:34]
    generation = model.generate(session, Sampling(seed=3), [(0,)], 60, [stop])
    text = "".join(piece for _, piece in generation)
    assert whole.startswith(text) and text != whole
    after = generation.finished()
    assert after.unread.pending or after.total > session.total
    same = model.generate(session, Sampling(seed=3), [(0,)], 60)
    (expected,) = (same.session for _ in same if same.session.total == after.total)
    assert all(map(torch.equal, state_tensors(after), state_tensors(expected)))
