"""torch.compile, as models use it: for the blocks, one kind at a time, and for the loss of a chunk of logits."""

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")

RECOMPILE_LIMIT = 64
"""How often a function may be compiled: for each kind of block, for other lengths, with and without gradients. Beyond
torch's own limit of 8, blocks would run uncompiled."""


@cache
def compiled(function: Callable[..., T]) -> Callable[..., T]:
    """Return a function compiled by torch.compile, once for all models."""
    from torch._inductor import config

    config.deterministic = True  # no kernel is chosen by its speed, so a resumed run computes the same bits
    torch._dynamo.config.recompile_limit = max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)
    return torch.compile(function)
