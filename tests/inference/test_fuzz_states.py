"""State files damaged at random: whatever is changed is seen and told, and no text comes of it.

What a number stands for, and many more of them: `tools/fuzz_states.py --states 1 --seed NUMBER`.
"""

from collections.abc import Iterator

import pytest
from inference import state_draws
from inference.state_draws import Place, prepare, try_state
from safetensors.torch import load_file

from lmlong.inference import state_file

USUAL = 15


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMLONG_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield prepare(tmp_path_factory.mktemp("place"))


def test_the_first_states(place: Place) -> None:
    assert {number: found for number in range(USUAL) if (found := try_state(number, place))[1]} == {}


def test_damage_that_is_not_seen_is_found(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_draws, "BYTES", (state_draws.flipped_tensors,))
    monkeypatch.setattr(state_file, "_verified", lambda path, about: load_file(path))
    assert any(try_state(number, place)[1] for number in range(20))
