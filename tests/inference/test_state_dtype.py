"""Sums in float64, for texts so long that float32 would take no more."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch.testing import assert_close

from lmlong.attention.feature_map_registry import FEATURE_MAPS
from lmlong.attention.linear.layer import LinearAttention
from lmlong.attention.linear.naive import LinearState
from lmlong.cli.generate import generate
from lmlong.inference.loading import load
from lmlong.inference.session import next_logits
from lmlong.recipe import Attention

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


def test_a_model_reads_the_same_with_either(run: Path, tmp_path: Path) -> None:
    usual, precise = load(run, "cpu"), load(run, "cpu", state_dtype="64")
    memories = [loaded.read("to be or not to be " * 50) for loaded in (usual, precise)]
    (usual_sums, *_), (sums, *_) = (session.state.blocks[0].attention for session in memories)
    assert (usual_sums.dtype, sums.dtype) == (torch.float32, torch.float64)
    logits = [next_logits(loaded.model, session)[0] for loaded, session in zip((usual, precise), memories, strict=True)]
    assert_close(*logits, rtol=1e-4, atol=1e-4)

    precise.save_state(memories[1], tmp_path / "precise.state")  # stays so, whoever goes on with it
    found = usual.load_state(tmp_path / "precise.state")
    assert found.state.blocks[0].attention.S.dtype == torch.float64
    assert torch.equal(next_logits(usual.model, found)[0], logits[1])
    usual.save_state(memories[0], tmp_path / "usual.state")
    assert precise.load_state(tmp_path / "usual.state").state.blocks[0].attention.S.dtype == torch.float64


def test_the_option_reaches_the_state(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "written.state"
    words = [str(run), "--prompt", "a", "--max-tokens", "3", "--state-dtype", "64", "--save-state", str(file)]
    assert CliRunner().invoke(generate, words, catch_exceptions=False).exit_code == 0
    assert load(run, "cpu").load_state(file).state.blocks[1].attention.z.dtype == torch.float64
