"""Outputs that are not finite, and the layer that they come from."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lmlong.attention.base import state_tensors
from lmlong.errors import CheckpointError
from lmlong.model.base import TextModel


class NotFinite(CheckpointError):
    """The model computes values that are not finite: its weights, or the state that it continues, are unusable."""

    def __init__(self, layer: str = "the output layer"):
        super().__init__(
            f"The output of {layer} is not finite, so the model's weights are unusable. Use another checkpoint."
        )


def is_finite(x: Tensor) -> bool:
    """Return whether all values are finite: their extremes are, which takes a fiftieth of the time on a CPU. NaN is
    both extremes."""
    return not x.numel() or bool(torch.stack(x.detach().aminmax()).isfinite().all())


def not_finite(model: TextModel, tokens: Tensor, *context: Any) -> NotFinite:
    """Return the error for tokens (B, T), in the context of `hidden_states`, for which the model gave a value that is
    not finite. They are read again to find the layer."""
    layers: list[str] = []

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            if not layers and not all(is_finite(x) for x in state_tensors(output) if x.is_floating_point()):
                layers.append(name)

        return note

    hooks = [module.register_forward_hook(hook(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad(), model.uncompiled():
            model(tokens, *context)
    finally:
        for each in hooks:
            each.remove()
    return NotFinite(*layers)
