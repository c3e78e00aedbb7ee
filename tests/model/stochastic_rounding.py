"""What a number format does to a computation: the same in float64, every result rounded to fewer bits at random.

Each number goes to one of the two around it that have so many bits, more often to the nearer one, so that repeated runs
scatter around the exact result as the format does with other orders of summation. A number of so few bits stays, and
equal numbers go the same way, as in the format: the errors of a constant decay add up.
"""

from functools import cache
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class StochasticRounding(TorchDispatchMode):
    """Within it, every operation on float64 tensors rounds its results to `bits` of their mantissa; float32 has 24."""

    def __init__(self, bits: int, seed: int):
        super().__init__()
        self._dropped = 53 - bits
        self._hash = Random(seed).getrandbits(62) | 1

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        results = found if isinstance(found, tuple | list) else (found,)
        for result, new in zip(results, _new_results(function), strict=False):
            if new and isinstance(result, Tensor) and result.dtype == torch.float64:
                mantissa, step = result.view(torch.int64), 1 << self._dropped
                noise = (mantissa * self._hash >> 64 - self._dropped).bitwise_and_(step - 1)
                mantissa.add_(noise).bitwise_and_(-step)
        return found


@cache
def _new_results(function: Any) -> list[bool]:
    """Return which results of an operation hold new numbers, and are no views of others."""
    aliases = [result.alias_info for result in function._schema.returns]
    return [alias is None or alias.is_write for alias in aliases]
