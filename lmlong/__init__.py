"""Causal language models for texts too long for softmax attention.

>>> result = lmlong.train(lmlong.Recipe.load("mine.yaml"))
>>> model = lmlong.load(result.run)
>>> for piece in model.stream("def ", max_tokens=100):
...     print(piece, end="", flush=True)
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import lmlong.errors as errors
from lmlong.errors import LmlongError

if TYPE_CHECKING:
    from lmlong import recipe
    from lmlong.attention.base import CausalAttention
    from lmlong.attention.feature_maps import FeatureMap
    from lmlong.attention.linear.layer import LinearAttention
    from lmlong.attention.plugins import load_plugin
    from lmlong.attention.softmax.layer import SoftmaxAttention
    from lmlong.attention.window.layer import WindowAttention
    from lmlong.evaluation.perplexity import evaluate
    from lmlong.evaluation.results import PerplexityReport
    from lmlong.inference.classify import Classification, TrainedClassifier
    from lmlong.inference.hidden_states import HiddenStates
    from lmlong.inference.loading import TrainedLanguageModel, load, load_classifier
    from lmlong.model.encoder import Encoder
    from lmlong.model.language_model import LanguageModel
    from lmlong.model.segments import text_loss
    from lmlong.model.state import detach_state, state_bytes
    from lmlong.recipe import Recipe
    from lmlong.surprisal.stream import score
    from lmlong.surprisal.units import Surprise
    from lmlong.training.run import TrainingResult, train

if sys.platform == "darwin":  # read when torch is imported: what Metal lacks is computed on the CPU
    os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")

__version__ = "0.1.0"
__all__ = [
    "CausalAttention",
    "Classification",
    "Encoder",
    "FeatureMap",
    "HiddenStates",
    "LanguageModel",
    "LinearAttention",
    "LmlongError",
    "PerplexityReport",
    "Recipe",
    "SoftmaxAttention",
    "Surprise",
    "TrainedClassifier",
    "TrainedLanguageModel",
    "TrainingResult",
    "WindowAttention",
    "detach_state",
    "errors",
    "evaluate",
    "load",
    "load_classifier",
    "load_plugin",
    "recipe",
    "score",
    "state_bytes",
    "text_loss",
    "train",
]

_HOMES = {
    "CausalAttention": "lmlong.attention.base",
    "Classification": "lmlong.inference.classify",
    "Encoder": "lmlong.model.encoder",
    "FeatureMap": "lmlong.attention.feature_maps",
    "HiddenStates": "lmlong.inference.hidden_states",
    "LanguageModel": "lmlong.model.language_model",
    "LinearAttention": "lmlong.attention.linear.layer",
    "PerplexityReport": "lmlong.evaluation.results",
    "Recipe": "lmlong.recipe",
    "SoftmaxAttention": "lmlong.attention.softmax.layer",
    "Surprise": "lmlong.surprisal.units",
    "TrainedClassifier": "lmlong.inference.classify",
    "TrainedLanguageModel": "lmlong.inference.loading",
    "TrainingResult": "lmlong.training.run",
    "WindowAttention": "lmlong.attention.window.layer",
    "detach_state": "lmlong.model.state",
    "evaluate": "lmlong.evaluation.perplexity",
    "load": "lmlong.inference.loading",
    "load_classifier": "lmlong.inference.loading",
    "load_plugin": "lmlong.attention.plugins",
    "score": "lmlong.surprisal.stream",
    "state_bytes": "lmlong.model.state",
    "text_loss": "lmlong.model.segments",
    "train": "lmlong.training.run",
}
"""The module of each public name that is imported when it is first used: importing lmlong alone costs nothing."""

if not TYPE_CHECKING:  # a type checker knows the names above, and that there are no others

    def __getattr__(name: str) -> Any:
        if name == "recipe":
            return import_module("lmlong.recipe")
        if name not in _HOMES:
            raise AttributeError(f"module 'lmlong' has no attribute '{name}'")
        return getattr(import_module(_HOMES[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
