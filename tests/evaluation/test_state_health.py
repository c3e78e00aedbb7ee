"""What is told of a state, where it is known in closed form."""

import numpy as np
import pytest
import torch
from grids import thinned
from models import stirred

from lmlong.attention.device_policy import CPU_POLICY, GPU_POLICY, use_policy
from lmlong.attention.feature_maps import ELU_FLOOR
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


@thinned(
    pytest.mark.parametrize("time", [2, 4, 36, 38]),
    pytest.mark.parametrize("starts", [[], [1, 2], [0, 9, 28]], ids=str),
)
def test_denominators_of_downsampled_layers_are_the_same_by_the_policy_of_a_gpu(time: int, starts: list[int]) -> None:
    cut = Downsample(factor=3, layers=1)
    options = Model(width=16, layers=3, heads=2, attention=Attention(kind="linear"), downsample=cut)
    model = stirred(LanguageModel(options, 30), 0.3).double()
    model.set_state_dtype(torch.float64)
    document_starts = torch.zeros(2, time, dtype=torch.bool)
    document_starts[0, [start for start in starts if start < time]] = True
    tokens, found = torch.arange(2 * time).view(2, time) % 30, []
    for policy in (CPU_POLICY, GPU_POLICY):
        use_policy(model, policy)
        found.append([number for bucket in denominators(model, tokens, document_starts) for number in bucket])
    assert found[1] == pytest.approx(found[0], rel=1e-9)


def test_softmax_has_no_state_health() -> None:
    model = LanguageModel(Model(width=16, layers=1, heads=2, attention=Attention(kind="softmax")), 30)
    assert health(model, np.arange(10)) == []
