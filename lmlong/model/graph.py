"""The step of a model as one graph."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Step = TypeVar("Step", bound=Callable[..., Any])

VARIANTS = 64
"""Graphs that may be made of the code of one step, which all models of a process share."""

ON_CPU: dict[str, Any] = {"realize_reads_threshold": 0, "realize_opcount_threshold": 0}
"""What is used again is computed once and kept: a vector that a matrix is multiplied with would be normed anew for each
row of the matrix, which takes longer than fetching the row where weights are small."""


def as_graph(step: Step, device: torch.device) -> Step:
    """The same step, compiled as a whole at its first call; a break in the graph is an error."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    options = ON_CPU if device.type == "cpu" else None
    return cast(Step, torch.compile(step, fullgraph=True, dynamic=False, options=options))
