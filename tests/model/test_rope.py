"""Rotary positions and the counting of places."""

import math

import pytest
import torch

from lmlong.model.rope import apply_rope, document_positions, rope_frequencies
from lmlong.recipe import Rope, RopeScaling


def test_products_depend_on_distance_alone() -> None:
    q, k = torch.randn(2, 1, 3, 1, 8, dtype=torch.float64)
    products = []
    for shift in (0, 5, 100_000):
        place = torch.tensor([[shift]])
        turned = (apply_rope(x, where, Rope()) for x, where in ((q, place + 7), (k, place)))
        products.append(math.prod(turned).sum(-1))
    assert torch.allclose(products[0], products[1], atol=1e-12)
    assert torch.allclose(products[0], products[2], atol=1e-9)


def test_a_rotation_is_that_of_the_formula() -> None:
    x = torch.tensor([[[[1.0, 0.0]]]], dtype=torch.float64)
    turned = apply_rope(x, torch.tensor([[2]]), Rope()).flatten()
    assert turned.tolist() == pytest.approx([math.cos(2), math.sin(2)], abs=1e-12)


def test_scaling_slows_down_the_turns_that_are_slow_within_the_original_length() -> None:
    """By the formula of Llama 3.1: 8,192 tokens, the factors 8, 1 and 4, the base 500,000."""
    scaling = RopeScaling(factor=8, original_length=8192)
    plain, scaled = (rope_frequencies(128, Rope(base=500_000, scaling=each)).tolist() for each in (None, scaling))
    wavelengths = [2 * math.pi / frequency for frequency in plain]
    for before, after, wavelength in zip(plain, scaled, wavelengths, strict=True):
        if wavelength < 8192 / 4:
            assert after == before
        elif wavelength > 8192 / 1:
            assert after == pytest.approx(before / 8)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            assert after == pytest.approx((1 - smooth) * before / 8 + smooth * before)
    assert {8.0, 1.0} < {round(before / after, 6) for before, after in zip(plain, scaled, strict=True)}


def test_positions_continue_from_the_state_and_restart_with_a_document() -> None:
    starts = torch.tensor([[False, False, True, False, True], [True, False, False, False, False]])
    assert document_positions(starts, torch.tensor([7, 7]), 5).tolist() == [[7, 8, 0, 1, 0], [0, 1, 2, 3, 4]]
    assert document_positions(None, torch.tensor([3]), 3).tolist() == [[3, 4, 5]]
