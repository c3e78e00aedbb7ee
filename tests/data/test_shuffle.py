"""Random orders that are computed element by element."""

import numpy as np
import pytest

from lmlong.data.shuffle import FEW, shuffled


@pytest.mark.parametrize("size", [1, 2, 5, FEW, FEW + 1, 100, 1000])
def test_an_order_has_each_element_once(size: int) -> None:
    assert sorted(shuffled(index, size, (1, 2)) for index in range(size)) == list(range(size))


@pytest.mark.parametrize("size", [5, FEW + 1])
def test_each_element_is_anywhere_and_after_any_other_equally_often(size: int) -> None:
    """By chi-square, with more draws than it takes to see a share that is off by a tenth."""
    draws = 1500
    orders = np.array([[shuffled(index, size, (seed,)) for index in range(size)] for seed in range(draws)])
    at = np.array([np.bincount(orders[:, index], minlength=size) for index in range(size)])
    _assert_uniform(at, freedom=(size - 1) ** 2)
    pairs = np.bincount((orders[:, :-1] * size + orders[:, 1:]).ravel(), minlength=size**2).reshape(size, size)
    _assert_uniform(pairs[~np.eye(size, dtype=bool)], freedom=size * (size - 1) - 1)


def _assert_uniform(counts: np.ndarray, freedom: int) -> None:
    chi_square = float(((counts - counts.mean()) ** 2).sum() / counts.mean())
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5
