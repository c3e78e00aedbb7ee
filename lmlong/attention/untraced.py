"""A call that torch.compile does not trace. Importing this module loads the compiler, which takes a second."""

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable
def untraced(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function outside the compiled graph: torch.compile would unroll the loop over spans, and cannot trace
    native code."""
    return function(*arguments)
