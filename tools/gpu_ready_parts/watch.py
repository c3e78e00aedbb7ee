"""A dispatch mode that counts the operations that a GPU would launch, and the bytes that are alive at a time.

It runs inside FakeTensorMode: tensors have shapes and no values, so nothing is computed, and whatever reads a value
(`.item()`, `nonzero`, an index by a mask) raises. A copy to the CPU is not noticed, since the fakes are on the CPU.
"""

import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


class Watch(TorchDispatchMode):
    """Counts operations by name in `operations`, and the bytes of new storages in `alive` and `peak`."""

    supports_higher_order_operators = True  # launches of Triton kernels, flex attention

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.alive = self.peak = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @property
    def count(self) -> int:
        return self.operations.total()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for x in tree_leaves((args, kwargs)):
            self._know(x, new=False)
        result = self._call(function, args, kwargs)
        for x in tree_leaves(result):
            self._know(x, new=True)
        self.peak = max(self.peak, self.alive)
        return result

    def _call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Count and call an operation; of an operation that consists of Triton kernels, count what it launches."""
        definition = OPDEFS.get(function._schema.name) if isinstance(function, OpOverload) else None
        if definition is not None and definition._abstract_fn is not None:
            before = self.count
            with self:
                result = definition._abstract_fn(*args, **kwargs)
            self.operations[str(function)] += self.count == before
            return result
        if launches(function):
            self.operations[str(function)] += 1
        return function(*args, **kwargs)

    def _know(self, x: Any, new: bool) -> None:
        """Count the bytes of a storage until it is freed; those of inputs that were there before are not counted."""
        if not isinstance(x, Tensor):
            return
        storage = x.untyped_storage()
        if (key := id(storage)) in self._storages:
            return
        size = storage.nbytes() if new else 0

        def freed(_: Any) -> None:
            del self._storages[key]
            self.alive -= size

        self._storages[key] = weakref.ref(storage, freed)
        self.alive += size


def launches(function: Any) -> bool:
    """Whether an operation does work on a GPU: no query, no allocation, no view of its input."""
    if not isinstance(function, OpOverload):
        return True
    name = function._schema.name.split("::")[-1]
    if function.namespace == "prim" or name in ALLOCATIONS or "unsafe_view" in name:
        return False
    returned = [value.alias_info for value in function._schema.returns]
    return not (returned and all(info is not None and not info.is_write for info in returned))
