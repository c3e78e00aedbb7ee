"""Gradients of every attention, feature map, decay and option of a model, by native code, torch and Triton."""

from functools import partial
from typing import Any

from baseline_parts.digests import Case
from baseline_parts.model_step import gradients
from baseline_parts.variants import DETAILS, ENCODERS, KINDS, LINEAR, linear, model
from baseline_parts.workspace import Options, Workspace

LENGTH = 144
"""Tokens of a row: more than two chunks, and no multiple of a chunk."""

SMALL = model(width=16, layers=1, heads=1) | {"text.sequence_length": 24}
"""What Triton's interpreter computes in seconds."""

TRITON: dict[str, dict[str, Any]] = {
    "linear elu": linear(),
    "linear elu none": linear(decay="none"),
    "linear favor": linear("favor"),
}


def measure(options: Options, kernels: tuple[str, ...], workspace: Workspace) -> dict[str, Any]:
    """Return the values of each kernel, without and with document starts or padding."""
    return {
        f"{kernel}, {'marked' if marked else 'plain'}": gradients(
            workspace.recipe({"text.sequence_length": LENGTH, **options, "training.kernel": kernel}), marked
        )
        for kernel in kernels
        for marked in (False, True)
    }


def interpreted(options: Options, workspace: Workspace) -> dict[str, Any]:
    """Return the values by Triton's kernels in its interpreter, with document starts."""
    return gradients(workspace.recipe({**options, **SMALL, "training.kernel": "triton"}), True)


CASES = [
    *(
        Case(f"gradients {name}", partial(measure, options, ("auto", "torch")))
        for name, options in (LINEAR | KINDS | DETAILS).items()
    ),
    *(Case(f"gradients {name}", partial(measure, options, ("auto",))) for name, options in ENCODERS.items()),
    *(Case(f"gradients triton {name}", partial(interpreted, options)) for name, options in TRITON.items()),
]
