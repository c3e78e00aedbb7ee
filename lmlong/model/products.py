"""Learned matrices."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class Product(nn.Linear):
    """A learned matrix (outputs, inputs)."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)


class Rounded(nn.Module):
    """A learned matrix kept in bfloat16, or in whole numbers up to 127 with a step for each row, for a model that
    learns no more."""

    steps: Tensor | None

    def __init__(self, matrix: Tensor, kept: torch.dtype):
        super().__init__()
        matrix, steps = matrix.detach(), None
        if kept == torch.int8:
            steps = matrix.abs().amax(1).clamp_min(torch.finfo(matrix.dtype).tiny) / 127
            matrix = (matrix / steps[:, None]).round()
        self.weight = nn.Parameter(matrix.to(kept), requires_grad=False)
        self.register_buffer("steps", steps)

    def forward(self, x: Tensor) -> Tensor:
        y = linear(x, self.weight.to(x.dtype))
        return y if self.steps is None else y * self.steps.to(x.dtype)

    def whole(self, dtype: torch.dtype) -> Tensor:
        """The matrix as it is multiplied with."""
        matrix = self.weight.to(dtype)
        return matrix if self.steps is None else matrix * self.steps[:, None].to(dtype)
