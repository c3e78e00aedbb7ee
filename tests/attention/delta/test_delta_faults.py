"""Mistakes that are easily made in the delta rule, planted: each is found by the laws."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attention.planted import native_mistake
from evaluation.test_law_check import broken, checked
from machine import needs_compiler
from torch import Tensor

from lmlong import recipe
from lmlong.attention.chunks import Decay
from lmlong.attention.delta import chunk, features, layer, native
from lmlong.attention.delta.naive import DeltaState

DELTA = recipe.Attention(kind="delta")

Patch = Callable[[pytest.MonkeyPatch], None]


def an_inverse_without_its_diagonal(patch: pytest.MonkeyPatch) -> None:
    solve = chunk._solve
    patch.setattr(chunk, "_solve", lambda L, right, *others: solve(L, right, *others) - right)


def a_new_write_that_decays_too(patch: pytest.MonkeyPatch) -> None:
    recurrent = layer.recurrent

    def wrong(*inputs: Any) -> tuple[Tensor, DeltaState]:
        y, state = recurrent(*inputs)
        log_decay = inputs[-1]
        return y, DeltaState(state.S * log_decay[..., -1:, None].exp())

    patch.setattr(layer, "recurrent", wrong)


def keys_scaled_over_the_wrong_axis(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(features, "_unit", lambda x: x * (x.square().sum(-2, keepdim=True) + features.TINY).rsqrt())


def a_state_in_bfloat16(patch: pytest.MonkeyPatch) -> None:
    forward = chunk.ChunkKernel.forward
    patch.setattr(chunk.ChunkKernel, "forward", lambda *inputs: forward(*inputs).bfloat16().float())


def document_starts_ignored_between_chunks(patch: pytest.MonkeyPatch) -> None:
    decay_masks = chunk.decay_masks

    def wrong(starts: Tensor | None, *others: Any) -> Decay:
        unstarted = decay_masks(None, *others)
        return (
            unstarted
            if starts is None
            else decay_masks(starts, *others)._replace(from_state=unstarted.from_state, chunk=unstarted.chunk)
        )

    patch.setattr(chunk, "decay_masks", wrong)


@pytest.mark.parametrize(
    "plant",
    [
        an_inverse_without_its_diagonal,
        a_new_write_that_decays_too,
        keys_scaled_over_the_wrong_axis,
        a_state_in_bfloat16,
        document_starts_ignored_between_chunks,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_mistake_in_torch_is_found(monkeypatch: pytest.MonkeyPatch, plant: Patch) -> None:
    monkeypatch.setattr(layer.DeltaAttention, "kernels", {"native": chunk.ChunkKernel})
    assert broken(checked(DELTA, tokens=300)) == set()
    plant(monkeypatch)
    assert broken(checked(DELTA, tokens=300)) != set()


@needs_compiler
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("std::fill_n(weights + s * TILE, s + 1, 0.0f)", "std::fill_n(weights + s * TILE, s + 2, 0.0f)"),
        ("for (Int s = 0; s < t; s++) subtract", "for (Int s = 0; s < t - 1; s++) subtract"),
        ("scale_rows(k, F, decay.to_end)", "scale_rows(k, F, decay.from_state)"),
        ("scale_to_unit(job.features, rows, factors);", ""),
        ("document_t == documents ? clamped_exp2(log2_decay - total_t) : zero", "clamped_exp2(log2_decay - total_t)"),
    ],
)
def test_a_mistake_in_native_code_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, right: str, wrong: str
) -> None:
    with native_mistake(monkeypatch, tmp_path, native, right, wrong):
        assert broken(checked(DELTA, tokens=300)) != set()
