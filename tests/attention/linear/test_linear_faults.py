"""Mistakes that are easily made in a decay by channel, and in features of FAVOR+ by native code, planted: each is found
by the laws."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attention.cases import HEAD_DIM, HEADS, VALUE_DIM
from attention.planted import native_mistake
from evaluation.test_law_check import broken, checked
from machine import needs_compiler
from torch import Tensor

from lmlong import recipe
from lmlong.attention.chunks import Decay
from lmlong.attention.delta.features import Silu
from lmlong.attention.delta.layer import DeltaAttention
from lmlong.attention.feature_maps import Cosine
from lmlong.attention.linear import chunk, layer, native
from lmlong.attention.linear.layer import LinearAttention
from lmlong.attention.linear.naive import LinearState
from lmlong.attention.registry import CAUSAL
from lmlong.errors import UsageError
from lmlong.testing import examine_attention

CHANNEL = recipe.Attention(kind="linear", decay="channel")

Patch = Callable[[pytest.MonkeyPatch], None]


def wrong_step(patch: pytest.MonkeyPatch, spoil: Callable[[LinearState, LinearState, Tensor], LinearState]) -> None:
    """The recurrence with a state that `spoil` makes of the one before, the one after, and the decays (B, H, F)."""
    step = layer.recurrent_step

    def wrong(fq: Tensor, fk: Tensor, v: Tensor, before: LinearState, *others: Any) -> tuple[Tensor, LinearState]:
        y, after = step(fq, fk, v, before, *others)
        return y, spoil(before, after, others[-1].exp().squeeze(2))

    patch.setattr(layer, "recurrent_step", wrong)


def decay_on_the_axis_of_values(patch: pytest.MonkeyPatch) -> None:
    def spoil(before: LinearState, after: LinearState, decay: Tensor) -> LinearState:
        return after._replace(S=after.S + before.S * (decay[..., None, :] - decay[..., :, None]))

    wrong_step(patch, spoil)


def z_that_does_not_decay(patch: pytest.MonkeyPatch) -> None:
    wrong_step(patch, lambda before, after, decay: after._replace(z=after.z + before.z * (1 - decay)))


def a_new_write_that_decays_too(patch: pytest.MonkeyPatch) -> None:
    def spoil(before: LinearState, after: LinearState, decay: Tensor) -> LinearState:
        return LinearState(after.S - (after.S - before.S * decay[..., None]) * (1 - decay[..., None]), after.z)

    wrong_step(patch, spoil)


def pairs_that_forget_a_token_too_many(patch: pytest.MonkeyPatch) -> None:
    products = chunk.pair_products
    patch.setattr(chunk, "pair_products", lambda fq, fk, pairs: products(fq, fk, [pair * pair for pair in pairs]))


def one_decay_for_all_channels_within_a_chunk(patch: pytest.MonkeyPatch) -> None:
    products = chunk.pair_products

    def wrong(fq: Tensor, fk: Tensor, pairs: list[Tensor]) -> Tensor:
        return products(fq, fk, [pair.mean(-1, keepdim=True).expand_as(pair) for pair in pairs])

    patch.setattr(chunk, "pair_products", wrong)


def the_state_decayed_by_the_first_channel(patch: pytest.MonkeyPatch) -> None:
    masks = chunk.channel_decay_masks

    def wrong(*inputs: Any) -> Decay:
        decay = masks(*inputs)
        assert decay.chunk is not None
        return decay._replace(chunk=decay.chunk[..., :1, :].expand_as(decay.chunk))

    patch.setattr(chunk, "channel_decay_masks", wrong)


@pytest.mark.parametrize(
    "plant",
    [
        decay_on_the_axis_of_values,
        z_that_does_not_decay,
        a_new_write_that_decays_too,
        pairs_that_forget_a_token_too_many,
        one_decay_for_all_channels_within_a_chunk,
        the_state_decayed_by_the_first_channel,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_mistake_in_torch_is_found(monkeypatch: pytest.MonkeyPatch, plant: Patch) -> None:
    monkeypatch.setattr(LinearAttention, "kernels", {"native": chunk.ChunkKernel})
    assert broken(checked(CHANNEL, tokens=300)) == set()
    plant(monkeypatch)
    assert broken(checked(CHANNEL, tokens=300)) != set()


@needs_compiler
@pytest.mark.parametrize(
    ("feature_map", "right", "wrong"),
    [
        ("elu", "state[F * V + f] *= left[f];", ""),
        ("elu", "state[i] *= left[f];", "state[i] *= left[i % V];"),
        ("elu", "left[v] * gates[(s + 1) * F + f]", "left[v] * gates[s * F + f]"),
        ("elu", "const FloatVec gate = lanes(gates + t * F + f);", "const FloatVec gate = lanes(gates + f);"),
        ("elu", "after += lanes(gates + s * F + f);", "after += lanes(gates + f);"),
        ("elu", "simd_exp(after) * masks.to_end[s];", "simd_exp(after);"),
        ("elu", "rows[t * F + f] = sum +=", "rows[t * F + f] ="),
        ("favor", "scale * scale * squares[t] / 2", "scale * squares[t] / 2"),
        ("favor", "grad[i] - share * normed[i]", "grad[i]"),
        ("favor", "std::fill(row + (t < tokens ? job.features : 0), row + F, -INFINITY);", ""),
        ("favor", "std::copy_n(k, TILE * F, key_features + begin * F);", "std::copy_n(k, TILE * F, key_features);"),
    ],
)
def test_a_mistake_in_native_code_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, feature_map: str, right: str, wrong: str
) -> None:
    options = recipe.Attention(kind="linear", feature_map=feature_map, decay="channel")
    with native_mistake(monkeypatch, tmp_path, native, right, wrong):
        assert not examine_attention(CAUSAL["linear"](HEADS, HEAD_DIM, VALUE_DIM, options)).kept


@pytest.mark.parametrize(
    "made",
    [
        lambda: DeltaAttention(HEADS, HEAD_DIM, VALUE_DIM, Silu(HEAD_DIM), "channel"),
        lambda: LinearAttention(HEADS, HEAD_DIM, VALUE_DIM, Cosine(HEAD_DIM), "channel"),
    ],
    ids=["delta", "cosine"],
)
def test_an_attention_without_a_decay_by_channel_is_not_made_with_one(made: Callable[[], object]) -> None:
    with pytest.raises(UsageError, match=r"decay: \w+ does not support channel"):
        made()
