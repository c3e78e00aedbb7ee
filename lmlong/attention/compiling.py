"""torch.compile, as models use it: for the blocks, one kind at a time, and for the loss of a chunk of logits."""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

T = TypeVar("T")

RECOMPILE_LIMIT = 64
"""How often a function may be compiled: for each kind of block, for other lengths, with and without gradients. Beyond
torch's own limit of 8, blocks would run uncompiled."""


GPU_OPTIONS = {"realize_opcount_threshold": 100, "realize_acc_reads_threshold": 32}
"""Inductor's limits of a fused expression on a GPU. By its own, masks between documents would make the gradient of the
short convolution four tensors in memory (`tools/gpu_ready predict`)."""

STEP_OPTIONS = {**GPU_OPTIONS, "coordinate_descent_tuning": True}
"""The same for a decode step. Products with one vector then fuse with what is around them."""


@cache
def compiled(function: Callable[..., T], decodes: bool = False) -> Callable[..., T]:
    """Return a function compiled by torch.compile, once for all models; `decodes`: a step of one token. Torch keeps the
    code for later processes, in $TORCHINDUCTOR_CACHE_DIR."""
    from torch._inductor import config

    config.deterministic = True  # no kernel is chosen by its speed, so a resumed run computes the same bits
    torch._dynamo.config.recompile_limit = max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)
    options: Any = STEP_OPTIONS if decodes else GPU_OPTIONS
    return torch.compile(function, options=options if torch.cuda.is_available() else None)
