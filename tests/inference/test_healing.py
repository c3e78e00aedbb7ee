"""What follows a prompt is what would follow the same text within a longer one, however the prompt arrives."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models import predict, stirred

from lmlong.data.tokenizers.boundaries import settled
from lmlong.errors import LmlongError
from lmlong.inference import healing
from lmlong.inference.loading import TrainedLanguageModel, load
from lmlong.inference.sampling import Sampler, Sampling
from lmlong.inference.session import Session
from lmlong.inference.unread import UnreadText
from lmlong.model.language_model import LanguageModel

from .conftest import prose, tiny

TEXT = prose(60, seed=7)
CUTS = range(150, 190, 13)  # after a space, before one, and within words


@pytest.fixture(scope="module")
def loaded(subword_run: Path) -> TrainedLanguageModel:
    """In float64, so that a sum in another order draws the same."""
    found = load(subword_run, "cpu")
    found.model.double()
    return found


def text_after(loaded: TrainedLanguageModel, session: Session, **options: object) -> str:
    return "".join(loaded.stream("", state=session, **{"max_tokens": 12, "temperature": 1.0} | options))


def log_prob(loaded: TrainedLanguageModel, tokens: list[int]) -> float:
    """The log-probability of a text that begins with these tokens."""
    with torch.no_grad():
        logits, _ = predict(loaded.model, torch.tensor([[loaded.tokenizer.bos, *tokens]]))
    chosen = logits[0, :-1].log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])
    return float(chosen.sum())


@pytest.mark.parametrize("cut", CUTS)
def test_a_position_weighs_what_all_texts_have_that_continue_from_it(loaded: TrainedLanguageModel, cut: int) -> None:
    session, found = loaded.read(TEXT[:cut]), loaded.tokenizer.boundaries.covers(TEXT[:cut])
    begun = found[0].tokens[: settled(found)]
    expected = {}
    for tokens, head in found:
        following = [[]] if not head else [[n] for n in loaded.tokenizer.boundaries.tokens_beginning_with(head)]
        total = torch.tensor([log_prob(loaded, [*tokens, *more]) for more in following]).logsumexp(0)
        expected[head] = float(total) - log_prob(loaded, begun)
    starts = healing.starts(loaded.model, loaded.tokenizer, session, session.unread)
    assert {start.cover.head: start.log_weight for start in starts} == pytest.approx(expected, abs=1e-5)


def test_each_place_is_drawn_as_often_as_it_weighs(loaded: TrainedLanguageModel) -> None:
    sampler = Sampler(Sampling(temperature=1.0))
    weights = torch.tensor([0.5, 0.2, 0.3]).log().tolist()
    drawn = [sampler.choose(weights) for _ in range(2000)]
    assert [drawn.count(place) / 2000 for place in range(3)] == pytest.approx([0.5, 0.2, 0.3], abs=0.04)
    assert Sampler(Sampling(temperature=0)).choose(weights) == 0


@pytest.mark.parametrize("cut", CUTS)
def test_a_text_continues_the_same_however_its_prompt_arrives(
    loaded: TrainedLanguageModel, cut: int, tmp_path: Path
) -> None:
    prompt, place = TEXT[:cut], cut * 7 % cut
    expected = text_after(loaded, loaded.read(prompt))
    assert text_after(loaded, loaded.read(prompt[at : at + 5] for at in range(0, cut, 5))) == expected
    session = None
    for at in range(0, cut, 40):  # states of states
        session = loaded.read(prompt[at : at + 40], session)
    assert text_after(loaded, session) == expected
    loaded.save_state(loaded.read(prompt[: cut - place % 40 - 1]), tmp_path / "a.state")
    state = loaded.load_state(tmp_path / "a.state")
    rest = prompt[cut - place % 40 - 1 :]
    assert "".join(loaded.stream(rest, state=state, max_tokens=12, temperature=1.0)) == expected


@pytest.mark.parametrize("fast", [None, False])
@pytest.mark.parametrize("kind", ["linear", "softmax", "window", "downsampled"])
def test_each_row_of_a_batch_has_its_own_unread_text(
    loaded: TrainedLanguageModel, kind: str, fast: bool | None
) -> None:
    model = stirred(LanguageModel(tiny(kind), loaded.tokenizer.vocabulary), 0.3).eval()
    other = replace(loaded, model=model if fast is None else model.double())
    other.use_fast_engine(fast)
    prompts = [*(TEXT[:cut] for cut in (*CUTS[:3], 40)), "na\x00ï\ud800ve▁", ""]
    alone = ["".join(other.stream(prompt, max_tokens=9, temperature=0)) for prompt in prompts]
    sessions = [other.read(prompt[30:], other.read(prompt[:30])) for prompt in prompts]
    texts = [""] * len(prompts)
    for row, piece in other.generate(sessions, Sampling(temperature=0), [(0,)] * len(prompts), 9):
        texts[row] += piece
    assert texts == alone
    assert any(session.unread.pending for session in sessions)


def test_without_healing_the_tokens_of_a_prompt_are_its_own(loaded: TrainedLanguageModel) -> None:
    for prompt in (TEXT[:161], TEXT[:162]):
        session = loaded.read(prompt, heal=False)
        tokens = [loaded.tokenizer.bos, *loaded.tokenizer.encode(prompt)]
        assert session.recent == tuple(tokens) and not session.unread.pending
        later = loaded.read("", loaded.read(prompt), heal=False)
        assert later.recent == session.recent


def test_hidden_states_are_those_of_unread_text_too(loaded: TrainedLanguageModel) -> None:
    for cut in CUTS:
        state = loaded.read(TEXT[:cut])
        tokens = [*state.recent, *loaded.hidden_states("e that", state).tokens.tolist()[1:]]
        assert tokens == [loaded.tokenizer.bos, *loaded.tokenizer.encode(TEXT[:cut] + "e that")]


def test_text_that_cannot_change_is_read_at_once(run: Path, loaded: TrainedLanguageModel) -> None:
    assert load(run, "cpu").read("to be ").unread == UnreadText()
    assert not loaded.read("").unread.pending and not loaded.read("to be Ω").unread.pending
    assert loaded.read("to be ").unread.pending


def test_pieces_far_before_the_end_are_not_weighed(
    loaded: TrainedLanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(healing, "WEIGHED_TOKENS", 1)
    left_out = 0
    for cut in CUTS:
        session, covers = loaded.read(TEXT[:cut]), loaded.tokenizer.boundaries.covers(TEXT[:cut])
        begun = covers[0].tokens[settled(covers) :][:-1]
        found = healing.starts(loaded.model, loaded.tokenizer, session, session.unread)
        assert all(start.cover.tokens[: len(begun)] == begun for start in found)
        left_out += len(covers) - len(found)
    assert left_out


@pytest.mark.parametrize("tokens", [1, 9, 33])
def test_a_text_continues_from_its_state_as_if_it_had_not_stopped(loaded: TrainedLanguageModel, tokens: int) -> None:
    options = Sampling(temperature=0)
    first = loaded.generate(loaded.read(TEXT[:160]), options, [(0,)], tokens)
    begun = "".join(piece for _, piece in first)
    whole = "".join(loaded.stream(TEXT[:160], max_tokens=60, temperature=0))
    assert begun + text_after(loaded, first.finished(), max_tokens=60 - tokens, temperature=0) == whole


def test_a_state_is_that_of_the_printed_text(loaded: TrainedLanguageModel) -> None:
    whole = "".join(loaded.stream(TEXT[:160], max_tokens=80, temperature=0))
    for begin in range(0, len(whole) - 3, 20):
        stop = whole[begin : begin + 3]
        writing = loaded.generate(loaded.read(TEXT[:160]), Sampling(temperature=0), [(0,)], 80, [stop])
        printed = "".join(piece for _, piece in writing)
        session = writing.finished()
        text = loaded.tokenizer.decode_bytes(session.recent)
        assert stop not in printed and text + session.unread.pending == (TEXT[:160] + printed).encode()
        more = loaded.read(" that is", session)
        text = loaded.tokenizer.decode_bytes(more.recent)
        assert text + more.unread.pending == (TEXT[:160] + printed + " that is").encode()


def test_long_unread_text_is_read_as_far_as_it_is_settled(loaded: TrainedLanguageModel) -> None:
    """None is left by reading, but a state file may have some, and one step must not read thousands of tokens."""
    text, before = prose(300), loaded.read(TEXT[:50])
    waiting = before._replace(unread=UnreadText(b"", text.encode()))
    again = loaded.read("", waiting)
    expected = loaded.read(text, before._replace(unread=UnreadText()))
    assert len(again.unread.pending) < 100
    assert again.recent == expected.recent and again.unread == expected.unread


def test_unusable_weights_are_reported_within_a_piece(subword_run: Path) -> None:
    loaded = load(subword_run, "cpu")
    session = loaded.read(TEXT[:161])
    assert session.unread.pending
    with torch.no_grad():
        loaded.model.embedding.weight.fill_(torch.nan)
    for temperature in (0.0, 0.8):
        with pytest.raises(LmlongError, match="output of embedding is not finite"):
            text_after(loaded, session, temperature=temperature)
