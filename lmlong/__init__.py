"""Causal language models for texts too long for softmax attention.

>>> model = lmlong.load("runs/quickstart")
>>> for piece in model.stream("def ", max_tokens=100):
...     print(piece, end="", flush=True)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lmlong.errors import LmlongError

if TYPE_CHECKING:
    from lmlong.inference.loading import TrainedLanguageModel, load

__version__ = "0.1.0"
__all__ = ["LmlongError", "TrainedLanguageModel", "load"]

_HOMES = {"TrainedLanguageModel": "lmlong.inference.loading", "load": "lmlong.inference.loading"}


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first used: importing lmlong alone costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'lmlong' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
