"""The keys of hidden states."""

import pytest
import torch

from lmlong.model.learning.state import MOST_NUMBERS, keys_of, rank


@pytest.mark.parametrize(
    ("vocabulary", "width", "size"),
    [
        (4096, 256, 256),
        (4096, 1024, 1024),
        (4096, 2048, 1024),
        (49_152, 576, 64),
        (128_256, 2048, 32),
        (MOST_NUMBERS * 2, 8, 1),
    ],
)
def test_the_rank_of_keys_follows_from_vocabulary_and_width(vocabulary: int, width: int, size: int) -> None:
    assert rank(vocabulary, width) == size


def test_as_many_keys_as_hidden_states_are_the_hidden_states() -> None:
    hidden = torch.randn(3, 8)
    assert keys_of(hidden, torch.zeros(5, 8)) is hidden


def test_products_are_kept_in_the_mean() -> None:
    keys = keys_of(torch.eye(576, dtype=torch.float64), torch.zeros(5, 64))
    torch.testing.assert_close(keys.mT @ keys, 576 / 64 * torch.eye(64, dtype=torch.float64))
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(400, 576, generator=draw, dtype=torch.float64)
    keys = keys_of(hidden, torch.zeros(5, 64))
    slope = (keys @ keys.mT * (hidden @ hidden.mT)).sum() / (hidden @ hidden.mT).square().sum()
    assert abs(float(slope) - 1) < 0.05


def test_keys_have_the_precision_of_hidden_states() -> None:
    hidden, D = torch.randn(3, 8), torch.zeros(5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        keys = keys_of(hidden, D)
    assert keys.dtype == torch.float32 and keys.equal(keys_of(hidden, D))


def test_the_projection_is_the_same_on_every_machine() -> None:
    """Saved states depend on it."""
    keys = keys_of(torch.eye(6, dtype=torch.float64), torch.zeros(5, 2))
    expected = [[1.048518252801215, 0.1035190725477957], [0.5817427376180277, 1.2710873698230938]]
    torch.testing.assert_close(keys[:2], torch.tensor(expected, dtype=torch.float64))
