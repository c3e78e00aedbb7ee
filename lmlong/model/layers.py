"""The layers of every model: RMS norm, the gated MLP, and linear layers with quantized weights.

K inputs, N outputs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from lmlong import recipe
from lmlong.attention.device_policy import FollowsPolicy
from lmlong.attention.products import dtype_of_product, linear
from lmlong.model.quantization import GroupFormat, WeightFormat, quantized
from lmlong.model.weight_panels import pack, rounded_activations, unpack
from lmlong.native.grouped import kernel
from lmlong.native.rows import kernel as rows


class RMSNorm(FollowsPolicy):
    """Root-mean-square norm with a gain, computed in at least float32. A centered gain is stored as its difference from
    1."""

    def __init__(self, *shape: int, epsilon: float, centered: bool = False):
        super().__init__()
        self.epsilon, self.centered = epsilon, centered
        self.weight = nn.Parameter(torch.zeros(*shape) if centered else torch.ones(*shape))

    @property
    def gain(self) -> Tensor:
        return 1 + self.weight if self.centered else self.weight

    def forward(self, x: Tensor, gate: Tensor | None = None, for_product: bool = False) -> Tensor:
        """Return the norm of x, with a gate times its SiLU; `for_product`: in the dtype of a product of x."""
        gain, dtype = self.gain, dtype_of_product(x) if for_product else torch.promote_types(x.dtype, torch.float32)
        gates = [] if gate is None else [gate]
        if self.policy_for(x).native_rows and dtype in rows.DTYPES and rows.can_compute(x, *gates, weight=gain):
            return rows.norm(x, gain.expand(x.shape[-gain.ndim :]), self.epsilon, dtype, gate)
        y = rms_norm(x, x.shape[-1:], eps=self.epsilon) * gain
        y = y if gate is None else y * silu(gate)
        return y.to(dtype) if for_product else y


def block_norm(options: recipe.Model, *shape: int) -> RMSNorm:
    """Return a norm of the residual stream, or one like it."""
    return RMSNorm(*(shape or (options.width,)), epsilon=options.norm_epsilon, centered=options.centered_gains)


class Linear(nn.Linear):
    """A linear layer without bias, whose products can use its weight rounded as decoding will use it."""

    rounding: GroupFormat | None = None
    """The format to whose grid the weight is rounded; None if it is not."""

    def __init__(self, width: int, height: int):
        super().__init__(width, height, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, rounded_weight(self.weight, self.rounding))


class StackedLinear(Linear):
    """Linear maps of the same input, computed as one matrix product; Muon treats each matrix separately."""

    def __init__(self, width: int, heights: Sequence[int]):
        super().__init__(width, sum(heights))
        self.heights = [height for height in heights if height]


class SwiGLU(FollowsPolicy):
    """The gated MLP of a block, with its norm before it or after it."""

    def __init__(self, options: recipe.Model):
        super().__init__()
        inner = options.inner_width
        self.norm, self.norm_after = block_norm(options), options.norm == "after"
        self.in_proj = StackedLinear(options.width, [inner, inner])
        self.out_proj = Linear(inner, options.width)

    def forward(self, x: Tensor) -> Tensor:
        both = self.in_proj(x if self.norm_after else self.norm(x, for_product=True))
        y = self.out_proj(self.gated(both))
        return self.norm(y) if self.norm_after else y

    def gated(self, both: Tensor) -> Tensor:
        """Return silu(gate) * value, given both in one tensor."""
        if self.policy_for(both).native_rows and rows.can_compute(both):
            return rows.swiglu(both)
        gate, value = both.chunk(2, dim=-1)
        return silu(gate) * value


class BFloat16Linear(FollowsPolicy):
    """A linear layer for inference with its weight in bfloat16."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.outputs, self.inputs = weight.shape
        self.register_buffer("weight", weight.detach().to(torch.bfloat16))

    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.policy_for(x).rounds_inputs and x.dtype != torch.float64:
            return linear(x.to(torch.bfloat16), self.weight).to(x.dtype)
        return linear(x, self.weight.to(x.dtype))

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in `dtype`, as products use it."""
        return self.weight.to(dtype)


class GroupedLinear(nn.Module):
    """A linear layer for inference with its weight in int4 or int8. Inputs are rounded to int8, group by group."""

    panels: Tensor

    def __init__(self, weight: Tensor, group_format: GroupFormat):
        super().__init__()
        self.format = group_format
        self.outputs, self.inputs = weight.shape
        self.register_buffer("panels", pack(quantized(weight, group_format)))

    def forward(self, x: Tensor) -> Tensor:
        by_torch = x.dtype == torch.float64 or (x.requires_grad and torch.is_grad_enabled())
        if by_torch or x.device.type != "cpu" or kernel.library() is None:
            return linear(rounded_activations(x), self.dequantized(x.dtype))
        return kernel.multiply(x.float(), self.panels, self.outputs, self.format == "int4").to(x.dtype)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in `dtype`."""
        return unpack(self.panels, self.outputs, self.inputs, self.format).dequantized(dtype)


QuantizedLinear = BFloat16Linear | GroupedLinear


def quantized_linear(weight: Tensor, weight_format: WeightFormat) -> QuantizedLinear:
    """Return a linear layer with a weight in another format."""
    return BFloat16Linear(weight) if weight_format == "bf16" else GroupedLinear(weight, weight_format)


def rounded_weight(weight: Tensor, rounding: GroupFormat | None) -> Tensor:
    """Return a matrix with the values that it has when it is quantized in this format. Its gradient passes to the
    weight unchanged: a straight-through estimator (Bengio et al. 2013)."""
    return weight if rounding is None else _Rounded.apply(weight, rounding)  # type: ignore[no-any-return]


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, rounding: GroupFormat) -> Tensor:
        return quantized(weight, rounding, may_wait=False).dequantized(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
