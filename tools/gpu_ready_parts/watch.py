"""A dispatch mode that counts the operations that a GPU would launch, and the bytes that are alive at a time.

It runs inside FakeTensorMode: tensors have shapes and no values, so nothing is computed, and whatever reads a value
(`.item()`, `nonzero`, an index by a mask) raises. A copy to the CPU is not noticed, since the fakes are on the CPU.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from lmlong.model.allocations import Allocations

WAITS = (DataDependentOutputException, DynamicOutputShapeException)
"""Raised where a computation needs a value, so that a CPU would wait for the GPU."""

ALLOCATIONS = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "detach",
    "alias",
    "lift_fresh",
)


class Watch(Allocations):
    """Counts operations by name, and the bytes of new tensors, `now` and at the `peak`."""

    supports_higher_order_operators = True  # launches of Triton kernels, flex attention

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self._entered = 0

    @property
    def count(self) -> int:
        return self.operations.total()

    def __enter__(self) -> "Watch":
        self._entered += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._entered -= 1
        super().__exit__(*error)

    @contextmanager
    def autotuned(self) -> Iterator[None]:
        """Count autotuned kernels, which a library launches without torch, and launch none."""
        from triton.runtime.autotuner import Autotuner

        def run(kernel: Any, *_: Any, **__: Any) -> None:
            self.operations[kernel.base_fn.__name__] += self._entered > 0

        with patch.object(Autotuner, "run", run):
            yield

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Count and call an operation; of an operation that consists of Triton kernels, count what it launches."""
        definition = OPDEFS.get(function._schema.name) if isinstance(function, OpOverload) else None
        before = self.count
        if definition is not None and definition._abstract_fn is not None:
            with self:
                result = definition._abstract_fn(*args, **kwargs)
        else:
            result = function(*args, **kwargs)
        if self.count == before and launches(function):
            self.operations[str(function)] += 1
        return result


def launches(function: Any) -> bool:
    """Whether an operation does work on a GPU: no query, no allocation, no view of its input."""
    if not isinstance(function, OpOverload):
        return True
    name = function._schema.name.split("::")[-1]
    if function.namespace == "prim" or name in ALLOCATIONS or "unsafe_view" in name:
        return False
    returned = [value.alias_info for value in function._schema.returns]
    return not (returned and all(info is not None and not info.is_write for info in returned))
