"""A kernel with a planted error, to test that it is refused."""

from torch import Tensor

from lmlong.attention.linear.chunk import ChunkKernel
from lmlong.attention.scan import Before, Span


class WrongDk(ChunkKernel):
    """A kernel with a small error in one gradient."""

    name = "bad"

    def backward(self, x: Span, dx: Span, state: Tensor, dstate: Tensor, dweights: list[Tensor]) -> Before:
        before = super().backward(x, dx, state, dstate, dweights)
        before.k.mul_(1.02)
        return before
