"""The layers of every model: RMS norm, the gated MLP, and linear layers with quantized weights.

B batch, T time.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu

from lmlong import recipe
from lmlong.native.spec import NativeSpec


class RMSNorm(nn.Module):
    """Root-mean-square norm with a gain, computed in at least float32."""

    def __init__(self, *shape: int, epsilon: float):
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], eps=self.epsilon) * self.weight

    def native_spec(self) -> NativeSpec:
        return NativeSpec("rms_norm", {"epsilon": self.epsilon}, {"weight": self.weight})


class StackedLinear(nn.Linear):
    """Linear maps of the same input, computed as one matrix product; Muon treats each matrix separately."""

    def __init__(self, width: int, heights: Sequence[int]):
        super().__init__(width, sum(heights), bias=False)
        self.heights = [height for height in heights if height]

    def native_spec(self) -> NativeSpec:
        return NativeSpec("matrix", weights={"weight": self.weight})


class SwiGLU(nn.Module):
    """The gated MLP of a block, with its norm."""

    def __init__(self, options: recipe.Model):
        super().__init__()
        inner = options.inner_width
        self.norm = RMSNorm(options.width, epsilon=options.norm_epsilon)
        self.in_proj = StackedLinear(options.width, [inner, inner])
        self.out_proj = nn.Linear(inner, options.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.in_proj(self.norm(x)).chunk(2, dim=-1)
        return self.out_proj(silu(gate) * value)

    def native_spec(self) -> NativeSpec:
        return NativeSpec("swiglu", parts={"norm": self.norm, "in_proj": self.in_proj, "out_proj": self.out_proj})


class QuantizedLinear(nn.Module):
    """A linear layer for inference, with its weight in bfloat16, or in int8 with a scale for each row."""

    scales: Tensor | None

    def __init__(self, weight: Tensor, dtype: torch.dtype):
        super().__init__()
        weight, scales = weight.detach(), None
        if dtype == torch.int8:
            scales = weight.abs().amax(1).clamp_min(torch.finfo(weight.dtype).tiny) / 127
            weight = (weight / scales[:, None]).round()
        self.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
        self.register_buffer("scales", scales)

    def forward(self, x: Tensor) -> Tensor:
        y = linear(x, self.weight.to(x.dtype))
        return y if self.scales is None else y * self.scales.to(x.dtype)

    def native_spec(self) -> NativeSpec:
        return NativeSpec("matrix", weights={"weight": self.weight, "scales": self.scales})

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in `dtype`, as products use it."""
        weight = self.weight.to(dtype)
        return weight if self.scales is None else weight * self.scales[:, None].to(dtype)
