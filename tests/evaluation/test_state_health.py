"""What is told of a state, where it is known in closed form."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from grids import thinned

from lmlong.attention.device_policy import CPU_POLICY, GPU_POLICY, DevicePolicy, use_policy
from lmlong.attention.feature_maps import ELU_FLOOR, Elu
from lmlong.evaluation.state_health import denominators, health
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.model import language_model
from lmlong.model.language_model import LanguageModel
from lmlong.recipe import Attention, Downsample, Model


def test_equal_keys_use_all_features_and_make_denominators_grow() -> None:
    model = LanguageModel(Model(width=16, layers=2, heads=2, attention=Attention(kind="linear", decay="none")), 30)
    for block in model.blocks:
        torch.nn.init.zeros_(block.mixer.in_proj.weight)
    feature = 1 + ELU_FLOOR
    found = health(model, np.arange(21) % 30)
    assert [at.position for at in found] == [1, 2, 4, 8, 16, 21]
    for before, at in zip([0, 1, 2, 4, 8, 16], found, strict=True):
        assert (at.of, at.norm) == (8, 0)  # of values that are 0
        assert at.features == pytest.approx(8, rel=1e-5)
        assert at.smallest == pytest.approx((before + 1) * 8 * feature**2, rel=1e-5)


def test_health_does_not_depend_on_pieces(loaded: TrainedLanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    text = np.arange(150) % 250
    whole = health(loaded.model, text)
    monkeypatch.setattr(language_model, "PIECE", 7)
    for one, other in zip(whole, health(loaded.model, text), strict=True):
        assert one == pytest.approx(other, rel=1e-3)
    assert whole[-1].norm != pytest.approx(whole[0].norm, rel=0.1)


CUT = Downsample(factor=3, layers=1)
LAYERS: list[Any] = [("linear", None), ("linear", CUT), (["window", "linear", "window"], CUT)]
"""Denominators in every layer, or only in the one that reads blocks."""


@thinned(
    pytest.mark.parametrize("time", [2, 4, 36, 38]),
    pytest.mark.parametrize("starts", [[], [1, 2], [9, 28]], ids=str),
    pytest.mark.parametrize("policy", [CPU_POLICY, GPU_POLICY], ids=["CPU", "GPU"]),
)
def test_denominators_by_position_in_closed_form(
    time: int, starts: list[int], policy: DevicePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 8 features of one everywhere, the t-th token or block of a document divides by 8 t."""
    monkeypatch.setattr(Elu, "query", lambda self, q: torch.ones_like(q))
    begins = [0, *(start for start in starts if start < time)]
    document_starts = torch.zeros(2, time, dtype=torch.bool)
    document_starts[0, begins] = True  # the other row is one document
    sizes = [time, *(end - begin for begin, end in pairwise([*begins, time]))]
    positions = [position for size in sizes for position in range(1, size + 1)]
    for kind, cut in LAYERS if time >= CUT.factor else LAYERS[:2]:
        form = Attention(kind=kind, decay="none")
        model = LanguageModel(Model(width=16, layers=3, heads=2, attention=form, downsample=cut), 30)
        use_policy(model, policy)
        divided = [(position, position) for position in positions if kind == "linear"]
        divided += [(position, position // 3) for position in positions if cut and position % 3 == 0]
        expected = []
        for exponent in range(time.bit_length()):
            first, last = 1 << exponent, min((2 << exponent) - 1, time)
            if by := [number for position, number in divided if first <= position <= last]:
                expected.append((first, last, min(by), max(by)))
        found = denominators(model, torch.zeros(2, time, dtype=torch.long), document_starts)
        assert [(bucket.first, bucket.last, bucket.smallest / 8, bucket.largest / 8) for bucket in found] == expected


def test_softmax_has_no_state_health() -> None:
    model = LanguageModel(Model(width=16, layers=1, heads=2, attention=Attention(kind="softmax")), 30)
    assert health(model, np.arange(10)) == []
