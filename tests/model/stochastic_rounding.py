"""What a number format does to a computation: every operation is exact, and its result is rounded at random.

Each number goes to one of the two around it in the format, more often to the nearer one, so that repeated runs scatter
around the exact result as the format does with other orders of summation. A number of the format stays.
"""

from functools import cache
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class StochasticRounding(TorchDispatchMode):
    """Within it, operations on tensors of `dtype` are done in float64, and rounded to `bits` of the mantissa.

    What a float32 computation does in float64 on purpose is left alone. With an even seed equal numbers go the same
    way, as they do in the format: the errors of a constant decay add up. With an odd one each goes its own way.
    """

    def __init__(self, dtype: torch.dtype, bits: int, seed: int):
        super().__init__()
        self._dtype, self._dropped = dtype, 53 - bits
        self._hash = Random(seed).getrandbits(62) | 1
        self._draw = torch.Generator().manual_seed(seed) if seed % 2 else None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written, is_view = _aliases(function)
        if is_view or not self._is_ours([*args, *kwargs.values()]):
            return function(*args, **kwargs)
        wide_args = [_each(self._widened, x) for x in args]
        wide_kwargs = {name: _each(self._widened, x) for name, x in kwargs.items()}
        found = function(*wide_args, **wide_kwargs)
        if not written:
            return _each(self._rounded, found)
        for place, name in written:
            into, wide = (kwargs[name], wide_kwargs[name]) if name in kwargs else (args[place], wide_args[place])
            into.copy_(self._rounded(wide))
        return into

    def _is_ours(self, arguments: list[Any]) -> bool:
        """Return whether an operation is on tensors of the dtype, and its result too."""
        flat = [x for each in arguments for x in (each if isinstance(each, list | tuple) else [each])]
        dtypes = {x if isinstance(x, torch.dtype) else x.dtype for x in flat if isinstance(x, Tensor | torch.dtype)}
        return {dtype for dtype in dtypes if dtype.is_floating_point} == {self._dtype}

    def _widened(self, x: Any) -> Any:
        if isinstance(x, Tensor) and x.dtype == self._dtype:
            return x.double()
        return torch.float64 if x is self._dtype else x

    def _rounded(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dtype != torch.float64:
            return x
        mantissa, step = x.contiguous().view(torch.int64), 1 << self._dropped
        if self._draw is None:
            noise = (mantissa * self._hash >> 64 - self._dropped).bitwise_and_(step - 1)
        else:
            noise = torch.randint(step, mantissa.shape, generator=self._draw)
        return noise.add_(mantissa).bitwise_and_(-step).view(torch.float64).to(self._dtype)


def _each(function: Any, x: Any) -> Any:
    """Return a function of a value, or of each in a list."""
    return [function(each) for each in x] if isinstance(x, list | tuple) else function(x)


@cache
def _aliases(function: Any) -> tuple[list[tuple[int, str]], bool]:
    """Return the arguments that an operation writes to, by place and name, and whether its results are views."""
    schema = function._schema
    arguments = list(enumerate(schema.arguments))
    written = [(place, each.name) for place, each in arguments if each.alias_info and each.alias_info.is_write]
    return written, not written and any(result.alias_info for result in schema.returns)
