"""The step of a model as one graph."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Step = TypeVar("Step", bound=Callable[..., Any])

VARIANTS = 64
"""Graphs that may be made of the code of one step, which all models of a process share."""


def as_graph(step: Step) -> Step:
    """The same step, compiled as a whole at its first call; a break in the graph is an error."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    return cast(Step, torch.compile(step, fullgraph=True, dynamic=False))
