"""The memory that a computation takes, counted by its tensors."""

import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lmlong.attention.device_policy import GPU_POLICY, use_policy
from lmlong.model.build import Undrawn, build
from lmlong.model.device import autocast
from lmlong.model.language_model import LanguageModel
from lmlong.model.segments import text_loss
from lmlong.native.state import state_tensors
from lmlong.recipe import Recipe


def bytes_of_step(recipe: Recipe, vocabulary: int) -> int:
    """Return the bytes that training on a batch takes beside weights and their gradients, computed as on a GPU by
    torch's kernels, with tensors that have shapes and no values."""
    training, cpu = recipe.training, torch.device("cpu")
    shape = training.batch_size, recipe.text.sequence_length
    with FakeTensorMode(), Undrawn():
        model = build(recipe, vocabulary)
        use_policy(model, GPU_POLICY)
        if isinstance(model, LanguageModel):
            model.use_kernel("torch")
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        tokens = torch.zeros(shape, dtype=torch.long)
        with Allocations() as allocations:
            with autocast(cpu, training.precision):
                loss, _ = text_loss(model, tokens, tokens, segment=training.segment)
            loss.flatten()[0].backward()
    return allocations.peak


class Allocations(TorchDispatchMode):
    """Counts the bytes of all tensors that are created, as long as they live: real ones, or fake ones, which have
    shapes and no values."""

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
