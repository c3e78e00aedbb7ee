"""The formats of states: sums in float64, for texts so long that float32 would take no more, and caches in bfloat16."""

from itertools import permutations
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch.testing import assert_close

from lmlong.attention.feature_map_registry import FEATURE_MAPS
from lmlong.attention.linear.layer import LinearAttention
from lmlong.attention.linear.naive import LinearState
from lmlong.cli.evaluate import AS_TRAINED
from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.errors import UsageError
from lmlong.inference.loading import StateDtype, load
from lmlong.inference.session import next_logits
from lmlong.model.state import state_bytes
from lmlong.native.state import state_tensors
from lmlong.recipe import Attention

from .conftest import prose, tiny, write_run

LONG = 2.0**25
"""Tokens read before."""


@pytest.mark.parametrize("time", [1, 100])
def test_a_sum_of_32_million_tokens_still_grows_in_float64_and_only_there(time: int) -> None:
    attention = LinearAttention(1, 4, 4, FEATURE_MAPS["relu"](1, 4, Attention(feature_map="relu")))
    k = torch.full((1, 1, time, 4), 1 - 0.01)  # features of 1, for relu adds a floor
    v = torch.ones(1, 1, time, 4)
    for dtype, grown in ((torch.float32, False), (torch.float64, True)):
        attention.state_dtype = dtype
        empty = attention.init_state(1, k.device, torch.float32)
        state = LinearState(empty.S + LONG, empty.z + LONG)
        for _ in range(100 // time):
            y, state = attention(k, k, v, state)
        assert state.S.dtype == state.z.dtype == dtype
        expected = LONG + 100 if grown or time == 100 else LONG
        assert_close(state.z, torch.full_like(state.z, expected), rtol=1e-9, atol=0)
        assert y.dtype == torch.float32
        assert_close(y, torch.ones_like(y))


MODELS = {
    "linear": Attention(kind="linear"),
    "softmax": Attention(kind="softmax"),
    "window": Attention(kind=["linear", "window"], window=20),
    "parallel window": Attention(kind="linear", parallel_window=20),
}


@pytest.fixture(params=MODELS)
def of_kind(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    options = tiny().model_copy(update={"attention": MODELS[request.param]})
    return write_run(tmp_path / request.param, ByteTokenizer(), "bytes", 0.3, options)


def dtypes(state: object) -> set[torch.dtype]:
    return {x.dtype for x in state_tensors(state) if x.is_floating_point()}


def test_keys_and_values_are_cached_in_bfloat16_unless_more_is_asked(of_kind: Path) -> None:
    caches = of_kind.name != "linear"
    for state_dtype, cached, sums in (
        ("auto", torch.bfloat16, torch.float32),
        ("32", torch.float32, torch.float32),
        ("64", torch.float32, torch.float64),
        (AS_TRAINED, torch.float32, torch.float32),
    ):
        first, last = load(of_kind, "cpu", state_dtype=state_dtype).read(prose(100)).state.blocks
        assert not caches or cached in dtypes(last)
        assert dtypes((first.attention, last.attention)) <= {cached, sums}
        assert of_kind.name == "softmax" or dtypes(first.attention) >= {sums}


def test_a_file_is_continued_in_the_format_of_the_model(of_kind: Path, tmp_path: Path) -> None:
    """But for sums, which stay as exact as they are, whoever continues them."""
    models = {name: load(of_kind, "cpu", state_dtype=name) for name in get_args(StateDtype)}
    for writer, reader in permutations(models.values(), 2):
        session, file = writer.read(prose(100)), tmp_path / "text.state"
        writer.save_state(session, file)
        found, expected = reader.load_state(file), reader.read(prose(100))
        for x, saved, like in zip(*map(state_tensors, (found, session, expected)), strict=True):
            assert x.dtype == (torch.float64 if torch.float64 in (saved.dtype, like.dtype) else like.dtype)
            assert torch.equal(x, saved.to(x.dtype))
        logits = (next_logits(reader.model, each)[0] for each in (found, expected))
        tolerance = 1e-4 if of_kind.name == "linear" else 0.1
        assert_close(*logits, rtol=tolerance, atol=tolerance)
        assert len("".join(reader.stream("", state=found, max_tokens=20))) > 0


def test_a_cache_in_bfloat16_takes_half(tmp_path: Path) -> None:
    run, text = write_run(tmp_path / "softmax", ByteTokenizer(), "bytes", options=tiny("softmax")), prose(1000)
    sizes, states = [], []
    for state_dtype in ("32", "auto"):
        loaded, file = load(run, "cpu", state_dtype=state_dtype), tmp_path / f"{state_dtype}.state"
        session = loaded.read(text)
        loaded.save_state(session, file)
        sizes.append(file.stat().st_size), states.append(state_bytes(session.state.blocks))
    assert states[1] < 0.52 * states[0] and sizes[1] < 0.55 * sizes[0]


def test_a_format_that_there_is_not_is_refused(run: Path) -> None:
    with pytest.raises(UsageError, match=r"state_dtype: 'bf16' is not a format of states\. Choose from auto, 32, 64\."):
        load(run, "cpu", state_dtype="bf16")  # type: ignore[arg-type]
