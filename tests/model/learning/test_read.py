"""Learning while reading: any cuts, rows, document starts and decode steps give what the definition gives."""

import copy
from collections.abc import Iterator

import pytest
import torch
from machine import needs_native
from models import stirred
from torch import Tensor

from lmlong import recipe
from lmlong.decode.choice import fast_engine
from lmlong.decode.engine import step
from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.model.learning import read as reading
from lmlong.model.learning import state as learning_state
from lmlong.model.learning.naive import naive_read
from lmlong.model.learning.read import first_state, will_learn
from lmlong.model.learning.state import BLOCK, NOT_LEARNED, Delta, Rates, init_learned
from lmlong.model.loss import IGNORED
from lmlong.model.state import concat_states, state_row
from lmlong.native.state import map_state, state_tensors

VOCABULARY, TIME = 40, 75
RATES = Rates(rate=20.0, bias_rate=0.2, prior=3.0)


@pytest.fixture(scope="module")
def model() -> Iterator[LanguageModel]:
    torch.manual_seed(0)
    options = recipe.Model(width=32, layers=2, heads=4, attention=recipe.Attention(kind="linear"))
    model = stirred(LanguageModel(options, VOCABULARY)).double().eval()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "DEFAULT_RATES", RATES)
        yield model


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (2, TIME), generator=torch.Generator().manual_seed(0))


def define(model: LanguageModel, document: Tensor, learned: int = TIME) -> tuple[Tensor, Delta]:
    """Return the losses, and what is learned from the first `learned` tokens, by the definition."""
    hidden = model(document[None])[0][0].detach()
    weight = model.lm_head.weight.detach()
    delta = init_learned(torch.zeros(1), weight).delta
    nll, after = naive_read(
        weight,
        map_state(lambda x: x[0], delta),
        hidden,
        document.roll(-1),
        torch.arange(len(document)) < learned - 1,
        RATES.for_hidden(model.norm.weight),
    )
    return nll[:-1], after


def read(
    model: LanguageModel, tokens: Tensor, state: ModelState, cuts: list[int], starts: Tensor | None = None
) -> tuple[Tensor, ModelState]:
    """Return the losses (B, T - 1) of a text that is read in pieces, and the state after it."""
    losses = []
    targets = torch.cat([tokens[:, 1:], tokens.new_full((len(tokens), 1), IGNORED)], dim=1)
    for begin, end in zip([0, *cuts], [*cuts, tokens.shape[1]], strict=True):
        piece = slice(begin, end)
        nll, state = reading.score(
            model, tokens[:, piece], targets[:, piece], state, None if starts is None else starts[:, piece]
        )
        losses.append(nll)
    return torch.cat(losses, dim=1)[:, :-1], state


def assert_learned(state: ModelState, row: int, expected: Delta, **tolerance: float) -> None:
    assert state.learned is not None and expected.D.abs().max() > 1e-3
    for x, y in zip(state.learned.delta, expected, strict=True):
        torch.testing.assert_close(x[row], y, **tolerance)


@pytest.fixture(params=[None, VOCABULARY * 20], ids=["all keys", "fewer keys"])
def keys(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many keys as hidden states, and as few as for a large vocabulary."""
    if request.param is not None:
        monkeypatch.setattr(learning_state, "MOST_NUMBERS", request.param)


@pytest.mark.parametrize("begins", [[0], [0, 20, 21, 53]], ids=["one document", "packed"])
@pytest.mark.parametrize("cuts", [[], [1], [17], [33, 34, 49], [15, 16, 17, 31, 32, 33, 70]])
def test_any_cuts_give_the_definition_of_each_document(
    model: LanguageModel, tokens: Tensor, keys: None, cuts: list[int], begins: list[int]
) -> None:
    starts = torch.zeros_like(tokens, dtype=torch.bool)
    starts[0, begins] = starts[1, 0] = True
    nll, state = read(model, tokens, first_state(model, 2, True), cuts, starts if len(begins) > 1 else None)
    for row, documents in ((0, begins), (1, [0])):
        for begin, end in zip(documents, [*documents[1:], TIME], strict=True):
            expected, delta = define(model, tokens[row, begin:end])
            torch.testing.assert_close(nll[row, begin : end - 1], expected)
        assert_learned(state, row, delta)


@pytest.mark.parametrize("prompt", [0, 1, 15, 16, 40])
def test_decode_steps_give_the_definition(model: LanguageModel, tokens: Tensor, keys: None, prompt: int) -> None:
    state, losses = first_state(model, 2, True), []
    if prompt:
        _, state = reading.read(model, tokens[:, :prompt], state)
    for token, following in zip(tokens.mT[prompt:-1], tokens.mT[prompt + 1 :], strict=True):
        logits, state = step(model, token, state)
        losses.append(torch.nn.functional.cross_entropy(logits, following, reduction="none"))
    _, state = step(model, tokens[:, -1], state)
    for row, document in enumerate(tokens):
        expected, delta = define(model, document)
        torch.testing.assert_close(torch.stack(losses, dim=1)[row], expected[prompt:])
        assert_learned(state, row, delta)


@needs_native
@torch.no_grad()
def test_native_decode_steps_learn_the_same(model: LanguageModel, tokens: Tensor) -> None:
    by_torch = copy.deepcopy(model).float()
    native = copy.copy(by_torch)
    native.engine = fast_engine(native)
    state = expected_state = first_state(by_torch, 2, True)
    for token in tokens.mT:
        expected, expected_state = step(by_torch, token, expected_state)
        logits, state = step(native, token, state)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert expected_state.learned is not None
    for x, y in zip(state_tensors(state.learned), state_tensors(expected_state.learned), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def test_rows_at_different_positions_are_independent_and_their_states_stay(
    model: LanguageModel, tokens: Tensor
) -> None:
    """So that a session may be forked and rewound."""
    states = []
    for row, read_before in ((0, 37), (1, 16)):
        _, state = reading.read(model, tokens[row : row + 1, :read_before], first_state(model, 1, True))
        states.append(state)
    begun, more = concat_states(states), tokens[:, 40:70]
    kept = [x.clone() for x in state_tensors([begun, *states])]
    nll, together = read(model, more, begun, [9])
    step(model, more[:, 0], begun)
    for row, state in enumerate(states):
        alone, after = read(model, more[row : row + 1], state, [])
        torch.testing.assert_close(nll[row], alone[0])
        for x, y in zip(state_tensors(state_row(together, row)), state_tensors(after), strict=True):
            torch.testing.assert_close(x, y)
    assert all(torch.equal(x, y) for x, y in zip(state_tensors([begun, *states]), kept, strict=True))


def test_text_of_the_model_itself_is_predicted_but_not_learned_from(model: LanguageModel, tokens: Tensor) -> None:
    _, state = reading.read(model, tokens[:, :20], first_state(model, 2, True))
    for token in tokens.mT[20:]:
        _, state = step(model, token, will_learn(state, False))
    _, delta = define(model, tokens[0], learned=20)
    assert_learned(state, 0, delta)


def test_an_old_state_begins_to_learn_from_the_text_after_it(model: LanguageModel, tokens: Tensor) -> None:
    """Its last token was predicted before, so the first token that is learned from is the second after it."""
    _, state = model(tokens[:, :20])
    learned = init_learned(state.position, model.lm_head.weight)
    assert bool(learned.skip.all()) and bool((learned.targets == NOT_LEARNED).all())
    assert init_learned(torch.tensor([0, 1]), model.lm_head.weight).skip.tolist() == [False, True]
    nll, _ = read(model, tokens[:, 20:], state._replace(learned=learned), [7])
    plain, _ = read(model, tokens[:, 20:], state, [7])
    torch.testing.assert_close(nll[:, :12], plain[:, :12])
    assert (nll[:, 12:] - plain[:, 12:]).abs().max() > 1e-3


def test_noise_leaves_everything_finite(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rates of a row fall as its errors add up, so D grows at most with the square root of the text, and the scale
    falls to 0 where nothing can be learned."""
    noise = torch.randint(VOCABULARY, (1, 20_000), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(reading, "DEFAULT_RATES", RATES._replace(rate=200.0))  # far beyond a useful rate
    nll, state = read(model, noise, first_state(model, 1, True), [])
    assert state.learned is not None
    rates, blocks = RATES._replace(rate=200.0).for_hidden(model.norm.weight), noise.shape[1] / BLOCK
    largest = float(model(noise[:, :1000])[0].detach().norm(dim=-1).max())
    squares = state.learned.delta.squares[0] / rates.prior
    bound = rates.rate * rates.prior**0.5 * BLOCK**0.5 * 1.1 * largest * (blocks * squares.log1p()).sqrt()
    assert bool((state.learned.delta.D[0].norm(dim=-1) < bound).all())
    plain, _ = read(model, noise[:, :2000], model.init_state(1), [])
    assert float(nll[:, -2000:].mean()) < float(plain.mean()) + 0.01
