"""Declarations of a model's modules, from which C++ reimplements them.

A reimplementation must read everything that a module declares. It refuses an unknown class, option or weight instead of
ignoring it.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn

EMPTY: Mapping[str, Any] = MappingProxyType({})


class NativeSpec(NamedTuple):
    """A module's kind, and all options, weights and submodules that its output depends on."""

    kind: str
    options: Mapping[str, Any] = EMPTY
    weights: Mapping[str, Tensor | None] = EMPTY
    parts: Mapping[str, nn.Module | Sequence[nn.Module] | None] = EMPTY
    sources: Sequence[Tensor] = ()
    """Parameters of the module from which some of `weights` are computed."""


class NoNativeForm(Exception):
    """A reimplementation does not support a module or something that it declares."""

    def __init__(self, module: nn.Module, why: str):
        super().__init__(why)
        self.module, self.why = module, why


def spec_of(module: nn.Module) -> NativeSpec:
    """Return what a module declares. Its own class must define `native_spec`: an inherited one may describe another
    computation."""
    if module._forward_hooks or module._forward_pre_hooks:
        raise NoNativeForm(module, "has hooks, which native code would not call")
    if "forward" in vars(module):
        raise NoNativeForm(module, "has a forward set on the instance, which native code would not call")
    if type(module) is nn.Linear:
        bias = {} if module.bias is None else {"bias": module.bias}
        return NativeSpec("matrix", weights={"weight": module.weight, **bias})
    if type(module) is nn.Embedding:
        return NativeSpec("matrix", weights={"weight": module.weight})
    if "native_spec" not in vars(type(module)):
        raise NoNativeForm(module, f"{type(module).__name__} declares no native form")
    return module.native_spec()  # type: ignore[operator]


class ModelReader:
    """Opens the modules of a model, and checks that all of their declarations are read."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._opened: dict[int, NativeSpec] = {}

    def open(self, module: Any, kind: str = "") -> NativeSpec:
        """Return what a module declares. If `kind` is given, the module must be of it."""
        if id(module) not in self._opened:
            spec = spec_of(module)
            options, weights, parts = (_Declared(module, each) for each in (spec.options, spec.weights, spec.parts))
            self._opened[id(module)] = NativeSpec(spec.kind, options, weights, parts, spec.sources)
        spec = self._opened[id(module)]
        if kind not in ("", spec.kind):
            raise NoNativeForm(module, f"is of kind {spec.kind}; only {kind} is supported here")
        return spec

    def check_all_read(self) -> None:
        """Raise NoNativeForm if a declaration of an opened module was not read, or if no opened module declares some
        weight of the model."""
        declared = [each for spec in self._opened.values() for each in (spec.options, spec.weights, spec.parts)]
        for names in declared:
            assert isinstance(names, _Declared)
            if names.unread:
                raise NoNativeForm(names.module, f"declares {min(names.unread)}, which is not supported")
        specs = self._opened.values()
        declared_weights = (x for spec in specs for x in (*spec.weights.values(), *spec.sources) if x is not None)
        declared_memory = {_memory(weight) for weight in declared_weights}
        for name, weight in chain(self._model.named_parameters(), self._model.named_buffers()):
            if _memory(weight) not in declared_memory:
                raise NoNativeForm(self._model, f"has {name}, which is not supported")


def _memory(weight: Tensor) -> tuple[int, int]:
    """Return an identity that a weight and its transpose share."""
    return weight.data_ptr(), weight.numel()


class _Declared(dict[str, Any]):
    """Options, weights or parts of a module by name. Tracks which of them are read."""

    def __init__(self, module: nn.Module, declared: Mapping[str, Any]):
        super().__init__(declared)
        self.module, self.unread = module, set(declared)

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise NoNativeForm(self.module, f"declares no {name}")
        self.unread.discard(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.unread.discard(name)
        return super().get(name, default)
