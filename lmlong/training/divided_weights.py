"""Weights that are divided among the ranks as soon as they are made, for DeepSpeed's stage 3."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import deepspeed
from deepspeed.runtime.zero.utils import is_zero_param
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode

from lmlong.native.state import state_tensors


class DividedWeights(TorchFunctionMode):
    """A mode in which models are built, and weights are loaded, without any rank ever holding the whole model.

    A module's weights are divided when the module becomes a part of another one. From then on, each function of torch
    that is called with such a weight sees the whole weight, on the CPU, and what it writes is divided again. So code
    that builds models need not know of this mode. All ranks draw the same numbers as a single process does.
    """

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        self.config = config
        self.hooks = ExitStack()

    def __enter__(self) -> "DividedWeights":
        self.hooks.callback(register_module_module_registration_hook(self._divide).remove)
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.hooks.close()

    def _divide(self, module: nn.Module, name: str, part: nn.Module) -> None:
        if part is not None and not all(map(is_zero_param, part.parameters())):
            super().__exit__(None, None, None)  # DeepSpeed calls functions of torch with weights that it divides
            try:
                deepspeed.zero.Init(module=part, config_dict_or_path=self.config)
            finally:
                super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        weights: list[Any] = [x for x in state_tensors((args, kwargs)) if is_zero_param(x)]
        if weights and func == Tensor.shape.__get__:  # type: ignore[attr-defined]
            return weights[0].ds_shape
        with whole(weights):
            return func(*args, **(kwargs or {}))


@contextmanager
def whole(weights: list[Any]) -> Iterator[None]:
    """Gather divided weights whole on the CPU, and divide them again with the values that they have afterwards; all
    ranks enter this."""
    if not weights:
        yield
        return
    with deepspeed.zero.GatheredParameters(weights, modifier_rank=0):
        devices = [weight.device for weight in weights]
        for weight in weights:
            weight.data = weight.data.cpu()
        yield
        for weight, device in zip(weights, devices, strict=True):
            weight.data = weight.data.to(device)
