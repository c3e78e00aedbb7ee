"""Counts the bytes of tensors, real ones or fake ones, which have shapes and no values."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lmlong.native.state import state_tensors


class Allocations(TorchDispatchMode):
    """Counts the bytes of all tensors that are created, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.counted: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.counted.update(_storages((args, kwargs)))  # earlier tensors and views of them do not count
        result = self.call(function, args, kwargs)
        for storage in _storages(result):
            if storage not in self.counted:
                self.counted.add(storage)
                self._change(storage.nbytes())
                weakref.finalize(storage, self._change, -storage.nbytes())
        return result

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Call an operation."""
        return function(*args, **kwargs)

    def _change(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [x.untyped_storage() for x in state_tensors(tree)]
