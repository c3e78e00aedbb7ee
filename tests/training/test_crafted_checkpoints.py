"""Checkpoints with changed values and a manifest that is right: used or refused, and nothing else.

What a number stands for, and many more of them: `tools/fuzz.py crafted-checkpoints --cases 1 --seed NUMBER`.
"""

from collections.abc import Iterator

import pytest
from training.crafted_checkpoints import Place, prepare, try_checkpoint

USUAL = 40


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMLONG_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield prepare(tmp_path_factory.mktemp("place"))


def test_the_first_crafted_checkpoints(place: Place) -> None:
    tried = {number: try_checkpoint(number, place) for number in range(USUAL)}
    assert {number: complaints for number, (_, complaints) in tried.items() if complaints} == {}
    assert len({what for what, _ in tried.values()}) > 1
