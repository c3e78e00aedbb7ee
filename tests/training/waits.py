"""An instrument that finds, on a CPU, what would make a training step wait for a GPU."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import lmlong

PACKAGE = Path(lmlong.__file__).parent

READING = {"_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "_unique2", "unique_consecutive"}
"""Operations whose result, or its size, a CPU has to read."""

METHODS = {Tensor.tolist: "tolist", Tensor.numpy: "numpy", Tensor.cpu: "cpu"}
"""Methods that wait on a GPU, and are no operations of torch on a CPU."""

BETWEEN_STEPS = {("callbacks.py", name) for name in ("_score", "_final", "_save")}
"""Files and functions that may wait."""

COUNTED = {
    ("callbacks.py", "_fetch"): "fetch",
    ("signals.py", "agree"): "agree",
    ("progress.py", "step"): "clock",
    ("training_epoch_loop.py", "_broadcast_sigterm_tensor"): "Lightning",
}
"""Those whose waits are counted."""

ON_THE_CPU = {("segments.py", "__init__")}
"""Those that read a number of the CPU."""


class _Operations(TorchDispatchMode):
    def __init__(self, found: Callable[[str], None]):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.split("::")[-1]
        by_mask = name == "index" and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        if name in READING or by_mask:
            self.found(name)
        return function(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __init__(self, found: Callable[[str], None]):
        super().__init__()
        self.found = found

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in METHODS:
            self.found(METHODS[function])
        return function(*args, **(kwargs or {}))


@contextmanager
def count_waits() -> Iterator[Counter[str]]:
    """Count what would wait in the training steps within the block, by operation and place, and what waits between
    them: each fetch of their figures, each agreement of several processes on signals and time, and Lightning's own
    before each batch."""
    waits: Counter[str] = Counter()

    def found(name: str) -> None:
        frames = list(_frames(sys._getframe(2)))
        functions = {(Path(frame.f_code.co_filename).name, frame.f_code.co_name) for frame in frames}
        if between := functions & COUNTED.keys():
            waits.update(COUNTED[function] for function in between)
        elif ("training_epoch_loop.py", "advance") in functions and not functions & (BETWEEN_STEPS | ON_THE_CPU):
            place = next(f for f in frames if PACKAGE in Path(f.f_code.co_filename).parents)
            waits[f"{name} in {place.f_code.co_filename}:{place.f_lineno}"] += 1

    with ExitStack() as modes:
        modes.enter_context(_Operations(found))
        modes.enter_context(_Methods(found))
        yield waits


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame:
        yield frame
        frame = frame.f_back
