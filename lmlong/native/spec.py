"""What a module is to native code, by its own word.

Native code is a second implementation. It takes over only what each module of a model declares of itself, and all of
that; a class, an option or a weight that it does not know leaves the model to torch.
"""

from collections.abc import Mapping, Sequence
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


class NoNativeForm(Exception):
    """Native code does not know a module, or something about it."""

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
