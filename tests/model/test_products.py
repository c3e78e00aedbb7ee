"""Texts of any length need few shapes of half-precision products, for each of which a CPU keeps compiled code."""

from collections import defaultdict
from typing import Any

import pytest
import torch
from grids import thinned
from model.shapes import SHAPES, shaped
from torch.utils._python_dispatch import TorchDispatchMode

from lmlong.model.device import autocast
from lmlong.model.learning.read import score

CPU = torch.device("cpu")
LENGTHS = range(1, 301, 13)
PRODUCTS = {torch.ops.aten.mm.default: 0, torch.ops.aten.addmm.default: 1}
"""Products with weights, and which argument is the input."""


class Shapes(TorchDispatchMode):
    """Collects the numbers of rows of half-precision products, by the shape of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[torch.Size, set[int]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS and (x := args[PRODUCTS[func]]).dtype == torch.bfloat16:
            self.rows[args[PRODUCTS[func] + 1].shape].add(len(x))
        return func(*args, **(kwargs or {}))


@thinned(
    pytest.mark.parametrize("name", ["elu", "delta", "window", "ngram"]),
    pytest.mark.parametrize("weights", ["32", "bf16"]),
)
def test_texts_of_any_length_are_read_by_few_shapes_of_products(name: str, weights: str) -> None:
    model = shaped(SHAPES[name], weights)
    with torch.no_grad(), autocast(CPU, "bf16"), Shapes() as shapes:
        for length in LENGTHS:
            tokens = torch.arange(length)[None] % 50
            score(model, tokens, tokens)
    assert len(shapes.rows) >= 4
    assert all(len(rows) <= 10 for rows in shapes.rows.values()), shapes.rows
