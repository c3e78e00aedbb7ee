"""What was read is found again, and changes no text."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from interop.exported import FORMS
from serving.engines import Told, loaded, running, subwords, tiny
from torch import Tensor

from lmlong.data.tokenizers.base import Tokenizer
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.sampling import Sampling
from lmlong.model.state import state_bytes
from lmlong.serving.engine import PIECE
from lmlong.serving.prefix_cache import PrefixCache
from lmlong.serving.request import Request
from lmlong.serving.writer import KEPT_EVERY

MEMORY = 1 << 28
WORDS = ["a", "b", "cab ", "abacad", "\n", "dab, "]


@contextmanager
def counted(trained: TrainedLanguageModel) -> Iterator[list[int]]:
    """Numbers of tokens that the model reads at once."""
    read: list[int] = []

    def count(module: object, inputs: tuple[Tensor, ...]) -> None:
        read.append(inputs[0].shape[1])

    hook = trained.model.blocks[0].register_forward_pre_hook(count)
    yield read
    hook.remove()


@pytest.mark.parametrize(("form", "tokenizer"), [("elu", None), ("delta", subwords()), ("tables", None)])
def test_prompts_cut_from_each_other_are_gone_on_with_alike(
    tmp_path: Path, form: str, tokenizer: Tokenizer | None
) -> None:
    trained = loaded(tmp_path / "run", native=False, tokenizer=tokenizer, **FORMS[form])
    trained.model.double()  # so that rounding decides nothing
    draw, texts = random.Random(0), ["".join(random.Random(seed).choices(WORDS, k=300))[:300] for seed in range(3)]
    prompts = [draw.choice(texts)[: draw.randint(0, 300)] for _ in range(24)]
    asked = [
        Request(prompt, Sampling(seed=seed % 3, temperature=1.0), max_tokens=draw.randint(1, 12))
        for seed, prompt in enumerate(prompts)
    ]
    told = []
    for cache in (0, MEMORY):
        with running(trained, rows=3, prefix_cache=cache) as engine:
            told.append([Told(engine, request).text() for request in asked])
    assert told[0] == told[1] and engine.counts.cached_tokens > 0.5 * engine.counts.prompt_tokens


def test_nothing_that_was_read_is_read_again() -> None:
    with running(tiny(), prefix_cache=MEMORY) as engine, counted(tiny()) as read:
        prompt = "abcd" * 100
        written = Told(engine, Request(prompt, Sampling(temperature=0), max_tokens=7)).text()
        assert sum(read) == 400 + 7
        read.clear()
        assert Told(engine, Request(prompt, Sampling(temperature=0), max_tokens=7)).text() == written
        assert read == [1] * 7
        read.clear()
        Told(engine, Request(prompt + written + "dd", Sampling(temperature=0), max_tokens=1)).text()
        assert sum(read) == 2 + 1  # what followed, and the first token of all that was read before
        read.clear()
        Told(engine, Request(prompt[:-1] + "x", max_tokens=1)).text()
        assert sum(read) == 400 + 1  # no beginning of it was kept


def test_long_prompts_are_kept_on_their_way() -> None:
    draw = random.Random(0)
    text = "".join(draw.choices("abcd", k=2 * KEPT_EVERY + 300))
    with running(tiny(), prefix_cache=MEMORY) as engine, counted(tiny()) as read:
        Told(engine, Request(text, max_tokens=1)).text()
        read.clear()
        Told(engine, Request(text[: 2 * KEPT_EVERY + 100] + "x", max_tokens=1)).text()
        assert sum(read) <= 2 * PIECE + 100


def test_memory_is_bounded_and_holds_the_latest_used() -> None:
    session = tiny().read("abc")
    cache = PrefixCache(3 * state_bytes(session))
    texts = [[256, number, 7] for number in range(5)]
    for tokens in texts[:3]:
        cache.keep(tokens, session)
    assert cache.longest([*texts[0], 9]) is session
    for tokens in texts[3:]:
        cache.keep(tokens, session)
    assert len(cache) == 3 and cache.bytes == 3 * state_bytes(session)
    kept = [cache.longest(tokens) is not None for tokens in texts]
    assert kept == [True, False, False, True, True]
    assert PrefixCache(10).longest(texts[0]) is None
    small = PrefixCache(10)
    small.keep(texts[0], session)
    assert not len(small) and small.longest(texts[0]) is None


def test_the_longest_beginning_is_found() -> None:
    cache, draw = PrefixCache(1 << 30), random.Random(0)
    sessions = {}
    for number in range(60):
        tokens = tuple(draw.choices((1, 2), k=draw.randint(1, 8)))
        if tokens not in sessions:
            sessions[tokens] = tiny().read("a")._replace(last=torch.tensor([number]))
            cache.keep(tokens, sessions[tokens])
    for _ in range(300):
        tokens = tuple(draw.choices((1, 2), k=draw.randint(0, 10)))
        known = [size for size in range(len(tokens) + 1) if tokens[:size] in sessions]
        found = cache.longest(tokens)
        assert found is (sessions[tokens[: known[-1]]] if known else None)
