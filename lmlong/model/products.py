"""Products with learned matrices."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


def times(x: Tensor, matrix: Tensor) -> Tensor:
    """x (..., inputs) with matrix (outputs, inputs): (..., outputs)."""
    if torch.compiler.is_compiling() and x.device.type == "cpu" and x.numel() == x.shape[-1]:
        # One vector: all time goes into fetching the matrix. Written out, the compiler reads it once, in the type it is
        # kept in, several times as fast as a call for matrices of any shape.
        return (x.unsqueeze(-2) * matrix).sum(-1)
    return linear(x, matrix)


class Product(nn.Linear):
    """A learned matrix."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return times(x, self.weight)


class Rounded(nn.Module):
    """A learned matrix kept in bfloat16, for a model that learns no more."""

    def __init__(self, matrix: Tensor):
        super().__init__()
        self.weight = nn.Parameter(matrix.detach().bfloat16(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return times(x, self.weight.to(x.dtype))
