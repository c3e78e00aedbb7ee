"""Addresses of the weights of a model, for native code that reads them in place."""

import ctypes
import mmap
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lmlong.native.decode.structures import Dtype

DTYPES = {torch.float32: Dtype.FLOAT32, torch.bfloat16: Dtype.BFLOAT16}

CACHE_LINE = 64
HUGE_PAGE = 1 << 21
"""Bytes."""

Module = TypeVar("Module", bound=nn.Module)


class NoNativeForm(Exception):
    """Native code does not support a module or one of its weights."""

    def __init__(self, module: nn.Module, why: str):
        super().__init__(why)
        self.module, self.why = module, why


class Packer:
    """The weights of a model as addresses, which stay in memory as long as this object."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._known: set[nn.Module] = set()
        self.memory: dict[int, Tensor | ctypes.Structure | ctypes.Array[Any]] = {}
        """What native code reads, by address."""
        self._packed: set[tuple[int, int]] = set()
        self._versions = _versions(model)

    def known(self, module: Any, *classes: type[Module]) -> Module:
        """Return a module if it is of one of these classes, which native code reimplements. A subclass, a hook or a
        forward of the instance may compute something else."""
        if type(module) not in classes:
            raise _unknown(module)
        if module._forward_hooks or module._forward_pre_hooks:
            raise NoNativeForm(module, "has hooks, which native code would not call")
        if "forward" in vars(module):
            raise NoNativeForm(module, "has a forward set on the instance, which native code would not call")
        self._known.add(module)
        return module  # type: ignore[no-any-return]

    def floats(self, module: nn.Module, x: Tensor, transposed: bool = False) -> int:
        if x.dtype != torch.float32:
            raise NoNativeForm(module, f"its weights are in {x.dtype}; native code computes in float32")
        return self.address(x.mT if transposed else x)

    def address(self, x: Tensor) -> int:
        self.mark_packed(x)
        return self.hold(x.detach().contiguous())

    def hold(self, x: Tensor | ctypes.Structure | ctypes.Array[Any]) -> int:
        """Keep what native code reads in memory, and return its address."""
        address = x.data_ptr() if isinstance(x, Tensor) else ctypes.addressof(x)
        self.memory[address] = x
        return address

    def mark_packed(self, weight: Tensor) -> None:
        """Count a weight as packed: `address` was given what is computed from it."""
        self._packed.add(_memory(weight))

    @property
    def is_stale(self) -> bool:
        """Whether a weight was changed or moved after it was packed."""
        return self._versions != _versions(self._model)

    def check_complete(self) -> None:
        """Raise NoNativeForm if the model has a module that is not known, or a parameter or buffer that was not
        packed."""
        for module in self._model.modules():
            if module not in self._known and type(module) is not nn.ModuleList:
                raise _unknown(module)
        for name, weight in chain(self._model.named_parameters(), self._model.named_buffers()):
            if _memory(weight) not in self._packed:
                raise NoNativeForm(self._model, f"has {name}, which is not supported")


def _versions(model: nn.Module) -> list[tuple[int, int]]:
    """Return what changes when a weight is changed or moved. Inference tensors count no changes."""
    weights = list(model.parameters())
    return [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in weights]


def _unknown(module: nn.Module) -> NoNativeForm:
    return NoNativeForm(module, f"{type(module).__name__} has no native form")


def _memory(weight: Tensor) -> tuple[int, int]:
    """Return an identity that a weight and its transpose share."""
    return weight.data_ptr(), weight.numel()


def pack_in_huge_pages(weights: Sequence[Tensor]) -> None:
    """Move weights to one block of memory, in huge pages if the system has them. There are more small pages than TLB
    entries, so each token would look them all up."""
    sizes = [-(-weight.nbytes // CACHE_LINE) * CACHE_LINE for weight in weights]
    if hasattr(mmap, "MADV_HUGEPAGE"):  # file-backed or shared memory would have small pages
        memory = mmap.mmap(-1, sum(sizes) + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # not every system has them
            memory.madvise(mmap.MADV_HUGEPAGE)
    else:
        memory = mmap.mmap(-1, sum(sizes) + HUGE_PAGE)
    block = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -block.data_ptr() % HUGE_PAGE
    for weight, size in zip(weights, sizes, strict=True):
        packed = block[begin : begin + weight.nbytes].view(weight.dtype).view(weight.shape)
        weight.data = packed.copy_(weight.detach())
        begin += size
