"""n-gram attention: what its rows hold, its hashes, and its three ways to compute the same."""

import pytest
import torch
from grids import thinned
from machine import needs_native
from models import predict, stirred
from torch import Tensor

from lmlong import recipe
from lmlong.attention import laws
from lmlong.attention.device_policy import CPU_POLICY, GPU_POLICY
from lmlong.attention.inputs import last_tokens
from lmlong.attention.ngram.hashing import GOLDEN, NO_NGRAM, ngram_hashes, row_of
from lmlong.attention.ngram.layer import quadratic
from lmlong.attention.ngram.native.kernel import NativeNgram
from lmlong.attention.ngram.sort import SortKernel
from lmlong.attention.ngram.state import RECENT, WAITING, NgramState, OwnedNgramState, empty_state
from lmlong.attention.ngram.step import settle, step
from lmlong.decode import engine
from lmlong.decode.choice import fast_engine
from lmlong.model.language_model import LanguageModel
from lmlong.model.state import where_state


def hashes_of(tokens: list[int], sizes: list[int]) -> Tensor:
    """Hashes (1, H, T, 2) of one document."""
    row = torch.tensor([tokens])
    past = torch.zeros(1, max(sizes), dtype=torch.long)
    return ngram_hashes(last_tokens(row, past, torch.arange(len(tokens))[None]), sizes)


def test_hashes_are_the_same_on_every_machine() -> None:
    """A checkpoint's rows would otherwise mean something else there."""
    hashes = hashes_of([5, 0, 5, 0], [1, 2])[0]
    assert hashes[0, :, 1].tolist() == [3266014173702632454, GOLDEN, 3266014173702632454, GOLDEN]
    pair = 1921524629319094431
    assert hashes[1, :, 1].tolist() == [NO_NGRAM, pair, 1574009821641552331, pair]
    assert hashes[..., 1:, 0].equal(hashes[..., :-1, 1]) and (hashes[:, 0, 0] == NO_NGRAM).all()


def test_rows_of_tokens_are_their_own_and_those_of_ngrams_are_spread_evenly() -> None:
    tokens = torch.arange(4096)
    rows = row_of(ngram_hashes(tokens[None, :, None].expand(1, -1, 2), [1])[0, 0, :, 1], 16384)
    assert len(rows.unique()) == len(tokens)
    pairs = torch.cartesian_prod(torch.arange(200), torch.arange(200))
    counts = torch.bincount(row_of(ngram_hashes(torch.nn.functional.pad(pairs, (1, 0))[None], [2])[0, 0, :, 1], 1024))
    chi_square = float(((counts - counts.float().mean()) ** 2).sum() / counts.float().mean())
    assert len(counts) == 1024 and chi_square < 1023 + 5 * (2 * 1023) ** 0.5


def test_a_head_reads_the_values_that_followed() -> None:
    """a b c a b: after the second a the head of bigrams has nothing, that of single tokens the value of b."""
    a, b, c = 7, 8, 9
    v = torch.arange(5.0).view(1, 1, 5, 1).expand(1, 2, 5, 1)
    sums, numbers = quadratic(v, hashes_of([a, b, c, a, b], [1, 2]), None, 64)
    assert sums[0, 0, :, 0].tolist() == [0, 0, 0, 1, 2] and numbers[0, 0].tolist() == [0, 0, 0, 1, 1]
    assert sums[0, 1, :, 0].tolist() == [0, 0, 0, 0, 2] and numbers[0, 1].tolist() == [0, 0, 0, 0, 1]


def test_ngrams_that_share_a_row_replace_each_other() -> None:
    v = torch.arange(8.0).view(1, 1, 8, 1)
    hashes = hashes_of([0, 0, 1, 0, 0, 1, 1, 1], [1])
    sums, numbers = quadratic(v, hashes, None, 1)  # of one row, in turn of 0, 0, 1, 0, 0, 1 and 1
    assert sums.flatten().tolist() == [0, 1, 0, 0, 4, 0, 6, 13]
    assert numbers.flatten().tolist() == [0, 1, 0, 0, 1, 0, 1, 2]


@pytest.mark.parametrize("rows", [3, 200])
def test_the_order_of_sums_depends_on_nothing_but_the_row(rows: int) -> None:
    """Native code adds one value after another, however a text is cut: the same to the last bit."""
    v, hashes = drawn(300, 4, [1, 2, 3], torch.float32)
    whole, _, end = NativeNgram().read(v, hashes, None, empty_state((1, 3, rows), 4, v.device, v.dtype))
    state, parts = empty_state((1, 3, rows), 4, v.device, v.dtype), []
    for cut in (slice(0, 1), slice(1, 130), slice(130, 131), slice(131, 300)):
        sums, _, state = NativeNgram().read(v[:, :, cut], hashes[:, :, cut], None, state)
        parts.append(sums)
    assert torch.equal(torch.cat(parts, dim=2), whole)
    assert all(map(torch.equal, state, end))


def drawn(time: int, vocabulary: int, sizes: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Draw values (1, H, T, 4) and the hashes of random tokens."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (time,), generator=draw).tolist()
    return torch.randn(1, len(sizes), time, 4, generator=draw, dtype=dtype), hashes_of(tokens, sizes)


@thinned(
    pytest.mark.parametrize("rows", [5, 500]),
    pytest.mark.parametrize("form", ["lists", "table", "in place"]),
)
def test_more_tokens_than_both_lists_hold_by_steps(rows: int, form: str) -> None:
    """With lists of recent values as on a CPU, in the table alone as on a GPU, and in a table that an engine owns."""
    policy, lists = (CPU_POLICY if form == "lists" else GPU_POLICY), form == "lists"
    v, hashes = drawn(WAITING + 2 * RECENT + 30, 3, [2, 3], torch.float64)
    state = empty_state((1, 2, rows), 4, v.device, v.dtype)
    truth, count, end = SortKernel().read(v, hashes, None, state)
    if form == "in place":
        state = OwnedNgramState(*state)
    table = [x.data_ptr() for x in state[:3]]
    for t in range(v.shape[2]):
        sums, numbers, state = step(v[:, :, t : t + 1], hashes[:, :, t : t + 1], state, policy)
        assert torch.allclose(sums, truth[:, :, t : t + 1], atol=1e-10) and torch.equal(numbers, count[:, :, t : t + 1])
        assert (state.recent_ngram[..., 0] == NO_NGRAM).all()
    settled = settle(state, policy)
    assert (state.recent_ngram[..., -1] != NO_NGRAM).all() == lists and (state.number > 0).any()
    assert form != "in place" or [x.data_ptr() for x in state[:3]] == table
    assert (settled.recent_ngram == NO_NGRAM).all() and (settled.waiting_ngram == NO_NGRAM).all()
    assert torch.allclose(settled.S, end.S, atol=1e-10)
    assert torch.equal(settled.number, end.number) and torch.equal(settled.ngram, end.ngram)


@thinned(
    pytest.mark.parametrize("rows", [1, 5, 500]),
    pytest.mark.parametrize("starts", [None, [0, 40, 41], [57], [69]], ids=str),
)
def test_states_and_gradients_are_those_of_steps(rows: int, starts: list[int] | None) -> None:
    """From a state whose rows are kept, replaced or forgotten."""
    v, hashes = drawn(140, 7, [1, 2], torch.float64)
    v, hashes = torch.stack([v[0, :, :70], v[0, :, 70:]]), torch.stack([hashes[0, :, :70], hashes[0, :, 70:]])
    document_starts = torch.zeros(2, 70, dtype=torch.bool)
    if starts is not None:
        document_starts[0, starts] = True
        hashes[0, :, starts, 0] = NO_NGRAM
    empty = empty_state((2, 2, rows), 4, v.device, v.dtype)
    before = SortKernel().read(v.flip(0), hashes.flip(0), None, empty)[2]

    def by_steps(v: Tensor, state: NgramState) -> tuple[Tensor, Tensor, NgramState]:
        found = []
        for t, begun in enumerate(document_starts.T):
            state = where_state(begun, empty, state)
            *read, state = step(v[:, :, t : t + 1], hashes[:, :, t : t + 1], state, GPU_POLICY)
            found.append(read)
        sums, numbers = (torch.cat(parts, dim=2) for parts in zip(*found, strict=True))
        return sums, numbers, state

    def at_once(v: Tensor, state: NgramState) -> tuple[Tensor, Tensor, NgramState]:
        return SortKernel().read(v, hashes, None if starts is None else document_starts, state)

    results = []
    for read in (at_once, by_steps):
        given = v.clone().requires_grad_(), before.S.clone().requires_grad_()
        sums, numbers, state = read(given[0], before._replace(S=given[1]))
        slopes = (torch.linspace(1, 2, x.numel(), dtype=x.dtype).view(x.shape) for x in (sums, state.S))
        results.append((sums, numbers, *state, *torch.autograd.grad([sums, state.S], given, list(slopes))))
    for got, expected in zip(*results, strict=True):
        assert laws.error(got, expected) < 1e-13 if got.is_floating_point() else torch.equal(got, expected)


def test_nan_and_inf_stay_in_their_row_and_document() -> None:
    v, hashes = torch.ones(1, 1, 40, 2), hashes_of([0, 1] * 20, [1])
    v[:, :, 0], v[:, :, 5] = torch.nan, torch.inf  # of token 0, which nothing precedes, and what followed 0
    starts = torch.zeros(1, 40, dtype=torch.bool).index_fill(1, torch.tensor([20]), True)
    hashes[:, :, 20, 0] = NO_NGRAM
    for kernel in (NativeNgram(), SortKernel()):
        sums, _, _ = kernel.read(v, hashes, starts, empty_state((1, 1, 8), 2, v.device, v.dtype))
        infinite = ~sums.isfinite().all(-1)[0, 0]
        assert infinite.nonzero().flatten().tolist() == [*range(6, 20, 2)] and not sums.isnan().any()


@needs_native
def test_native_decode_over_more_tokens_than_both_lists_hold() -> None:
    ngram = recipe.Ngram(sizes=[1, 3, recipe.MAX_NGRAM], buckets=40)
    options = recipe.Model(width=24, layers=1, heads=3, attention=recipe.Attention(kind="ngram", ngram=ngram))
    torch.manual_seed(0)
    model = stirred(LanguageModel(options, 6), 0.5).eval()
    tokens = torch.randint(6, (2, 90)).repeat(1, 13)[:, : WAITING + 2 * RECENT + 20]  # long n-grams come again too
    truth, end = predict(model, tokens)
    model.engine = fast_engine(model)
    with torch.inference_mode():
        state = model.init_state(2)
        for t in range(tokens.shape[1]):
            logits, state = engine.step(model, tokens[:, t], state)
            assert torch.allclose(logits, truth[:, t], atol=1e-4)
        found = model.settle(state).blocks[0].attention
    assert torch.equal(found.ngram, end.blocks[0].attention.ngram)
    assert torch.allclose(found.S, end.blocks[0].attention.S, atol=1e-4)
