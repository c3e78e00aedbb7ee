"""Rotary positions and the counting of places."""

import math

import pytest
import torch

from lmlong.model.rope import apply_rope, document_positions


def test_products_depend_on_distance_alone() -> None:
    q, k = torch.randn(2, 1, 3, 1, 8, dtype=torch.float64)
    products = []
    for shift in (0, 5, 100_000):
        place = torch.tensor([[shift]])
        products.append((apply_rope(q, place + 7) * apply_rope(k, place)).sum(-1))
    assert torch.allclose(products[0], products[1], atol=1e-12)
    assert torch.allclose(products[0], products[2], atol=1e-9)


def test_a_turn_is_that_of_the_formula() -> None:
    turned = apply_rope(torch.tensor([[[[1.0, 0.0]]]], dtype=torch.float64), torch.tensor([[2]])).flatten()
    assert turned.tolist() == pytest.approx([math.cos(2), math.sin(2)], abs=1e-12)


def test_places_go_on_from_the_state_and_restart_with_a_document() -> None:
    starts = torch.tensor([[False, False, True, False, True], [True, False, False, False, False]])
    assert document_positions(starts, torch.tensor([7, 7]), 5).tolist() == [[7, 8, 0, 1, 0], [0, 1, 2, 3, 4]]
    assert document_positions(None, torch.tensor([3]), 3).tolist() == [[3, 4, 5]]
