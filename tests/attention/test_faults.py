"""Likely mistakes in the recurrences, planted one by one: the laws find each of them."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from attention.cases import build
from grids import every_nth
from machine import needs_compiler
from torch import Tensor

from lmlong import recipe
from lmlong.attention.chunks import Decay
from lmlong.attention.delta import chunk as delta_chunk
from lmlong.attention.delta import native as delta_native
from lmlong.attention.delta.layer import DeltaAttention
from lmlong.attention.linear import chunk as linear_chunk
from lmlong.attention.linear import layer as linear_layer
from lmlong.attention.linear import native as linear_native
from lmlong.attention.linear.layer import LinearAttention
from lmlong.attention.linear.naive import LinearState
from lmlong.native import build as native_build
from lmlong.testing import examine_attention

CHANNEL = recipe.Attention(kind="linear", decay="channel")
FAVOR = recipe.Attention(kind="linear", decay="channel", feature_map="favor")
DELTA = recipe.Attention(kind="delta")

Patch = Callable[[pytest.MonkeyPatch], None]


def decay_on_the_axis_of_values(patch: pytest.MonkeyPatch) -> None:
    step = linear_layer.recurrent_step

    def wrong(fq: Tensor, fk: Tensor, v: Tensor, before: LinearState, *others: Any) -> tuple[Tensor, LinearState]:
        y, after = step(fq, fk, v, before, *others)
        decay = others[-1].exp().squeeze(2)
        return y, after._replace(S=after.S + before.S * (decay[..., None, :5] - decay[..., :, None]))

    patch.setattr(linear_layer, "recurrent_step", wrong)


def an_inverse_without_its_diagonal(patch: pytest.MonkeyPatch) -> None:
    solve = delta_chunk._solve
    patch.setattr(delta_chunk, "_solve", lambda L, right, **how: solve(L, right, **how) - right)


def document_starts_ignored_between_chunks(patch: pytest.MonkeyPatch) -> None:
    decay_masks = delta_chunk.decay_masks

    def wrong(starts: Tensor | None, *others: Any) -> Decay:
        unstarted = decay_masks(None, *others)
        return decay_masks(starts, *others)._replace(from_state=unstarted.from_state, chunk=unstarted.chunk)

    patch.setattr(delta_chunk, "decay_masks", wrong)


@pytest.mark.parametrize(
    ("form", "plant"),
    [
        (CHANNEL, decay_on_the_axis_of_values),
        (DELTA, an_inverse_without_its_diagonal),
        (DELTA, document_starts_ignored_between_chunks),
    ],
    ids=lambda plant: getattr(plant, "__name__", ""),
)
def test_a_mistake_in_torch_is_found(monkeypatch: pytest.MonkeyPatch, form: recipe.Attention, plant: Patch) -> None:
    monkeypatch.setattr(LinearAttention, "kernels", {"native": linear_chunk.ChunkKernel})
    monkeypatch.setattr(DeltaAttention, "kernels", {"native": delta_chunk.ChunkKernel})
    plant(monkeypatch)
    assert not examine_attention(build(form)).kept


@needs_compiler
@every_nth(
    4,
    pytest.mark.parametrize(
        ("form", "native", "right", "wrong"),
        [
            (CHANNEL, linear_native, "state[F * V + f] *= left[f];", ""),
            (CHANNEL, linear_native, "left[v] * gates[(s + 1) * F + f]", "left[v] * gates[s * F + f]"),
            (CHANNEL, linear_native, "after += lanes(gates + s * F + f);", "after += lanes(gates + f);"),
            (CHANNEL, linear_native, "rows[t * F + f] = sum +=", "rows[t * F + f] ="),
            (FAVOR, linear_native, "grad[i] - share * normed[i]", "grad[i]"),
            (FAVOR, linear_native, "scale * scale * squares[t] / 2", "scale * squares[t] / 2"),
            (FAVOR, linear_native, "std::fill(row + (t < tokens ? job.features : 0), row + F, -INFINITY);", ""),
            (FAVOR, linear_native, "key_features + begin * F);", "key_features);"),
            (DELTA, delta_native, "for (Int s = 0; s < t; s++) subtract", "for (Int s = 0; s < t - 1; s++) subtract"),
            (DELTA, delta_native, "std::fill_n(weights + s * TILE, s + 1,", "std::fill_n(weights + s * TILE, s + 2,"),
            (DELTA, delta_native, "scale_rows(k, F, decay.to_end)", "scale_rows(k, F, decay.from_state)"),
            (
                DELTA,
                delta_native,
                "document_t == documents ? clamped_exp2(log2_decay - total_t) : zero",
                "clamped_exp2(log2_decay - total_t)",
            ),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    ),
)
def test_a_mistake_in_native_code_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: recipe.Attention, native: ModuleType, right: str, wrong: str
) -> None:
    """Compiled in a folder of its own, with `wrong` in the one place that has `right`."""
    found = 0
    for path in (*native.CODE.glob("*.h"), *native.CODE.glob("*.cpp"), native_build.SHARED_HEADERS / "decay.h"):
        text = path.read_text()
        found += text.count(right)
        (tmp_path / path.name).write_text(text.replace(right, wrong))
    assert found == 1
    monkeypatch.setattr(native, "CODE", tmp_path)
    monkeypatch.setenv("LMLONG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native_build, "FLAGS", [flag.replace("-O3", "-O1") for flag in native_build.FLAGS])
    native.library.cache_clear()
    kept = examine_attention(build(form)).kept
    native.library.cache_clear()
    assert not kept
