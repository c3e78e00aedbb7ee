"""What the modules of a model declare to code that computes the same in another way: C++, or a graph of ONNX.

Such code takes over only what each module declares of itself, and all of that. A class, an option or a weight that it
does not know is refused, rather than left out silently.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn

EMPTY: Mapping[str, Any] = MappingProxyType({})


class NativeSpec(NamedTuple):
    """What a module computes: its kind, and all options, weights and modules that its output depends on."""

    kind: str
    options: Mapping[str, Any] = EMPTY
    weights: Mapping[str, Tensor | None] = EMPTY
    parts: Mapping[str, nn.Module | Sequence[nn.Module] | None] = EMPTY
    sources: Sequence[Tensor] = ()
    """Weights of the module from which some of `weights` are computed."""


class NoNativeForm(Exception):
    """A module, or something that it declares, is not known to code that computes the same in another way."""

    def __init__(self, module: nn.Module, why: str):
        super().__init__(why)
        self.module, self.why = module, why


def spec_of(module: nn.Module) -> NativeSpec:
    """Return what a module declares, by a `native_spec` of its own class: one that it inherits may describe something
    else than what it computes."""
    if module._forward_hooks or module._forward_pre_hooks:
        raise NoNativeForm(module, "has hooks, which native code would not call")
    if "forward" in vars(module):
        raise NoNativeForm(module, "has a forward of its own in place of its class's")
    if type(module) is nn.Linear:
        bias = {} if module.bias is None else {"bias": module.bias}
        return NativeSpec("matrix", weights={"weight": module.weight, **bias})
    if type(module) is nn.Embedding:
        return NativeSpec("matrix", weights={"weight": module.weight})
    if "native_spec" not in vars(type(module)):
        raise NoNativeForm(module, f"{type(module).__name__} declares no native form")
    return module.native_spec()  # type: ignore[operator]


class ModelReader:
    """The modules of a model, each opened by the code that computes the same in another way."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._opened: dict[int, NativeSpec] = {}

    def open(self, module: Any, kind: str = "") -> NativeSpec:
        """Return what a module declares, which must be of this `kind` where one is given."""
        if id(module) not in self._opened:
            spec = spec_of(module)
            options, weights, parts = (_Declared(module, each) for each in (spec.options, spec.weights, spec.parts))
            self._opened[id(module)] = NativeSpec(spec.kind, options, weights, parts, spec.sources)
        spec = self._opened[id(module)]
        if kind not in ("", spec.kind):
            raise NoNativeForm(module, f"is of kind {spec.kind}, where {kind} is supported")
        return spec

    def check_all_read(self) -> None:
        """Raise NoNativeForm if an opened module declares something that was not read, or the model has a weight that
        no opened module declares."""
        declared = [each for spec in self._opened.values() for each in (spec.options, spec.weights, spec.parts)]
        for names in declared:
            assert isinstance(names, _Declared)
            if names.unread:
                raise NoNativeForm(names.module, f"declares {min(names.unread)}, which is not supported")
        specs = self._opened.values()
        known = {_memory(x) for spec in specs for x in (*spec.weights.values(), *spec.sources) if x is not None}
        for name, weight in chain(self._model.named_parameters(), self._model.named_buffers()):
            if _memory(weight) not in known:
                raise NoNativeForm(self._model, f"has {name}, which is not supported")


def _memory(weight: Tensor) -> tuple[int, int]:
    """Return what a weight and its transpose have in common."""
    return weight.data_ptr(), weight.numel()


class _Declared(dict[str, Any]):
    """Options, weights or parts of a module by their names, of which it notes those that are read."""

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
