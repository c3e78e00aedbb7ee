"""The base class of text models, whether they predict the next token or masked ones.

B batch, T time, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lmlong.model.layers import QuantizedLinear
from lmlong.model.loss import logits_in_float32
from lmlong.model.short_conv import ShortConvolution
from lmlong.native.spec import NativeSpec

EMBEDDING_STD = 0.02


class LMHead(nn.Module):
    """The output layer, whose weight is tied to the input embedding."""

    def __init__(self, embedding: nn.Embedding):
        super().__init__()
        self.tied = (embedding,)  # in a tuple, so that its weights are not listed twice

    @property
    def weight(self) -> Tensor:
        """The weight (V, width)."""
        return self.tied[0].weight

    def forward(self, function: Callable[..., Tensor], hidden: Tensor, *others: Tensor) -> Tensor:
        """Return function(hidden, weight, ...): logits, or a loss that never holds all of them."""
        return function(hidden, self.weight, *others)

    def native_spec(self) -> NativeSpec:
        return NativeSpec("lm_head", parts={"matrix": self.tied[0]})


class UntiedLMHead(LMHead):
    """The output layer with a weight of its own, which is drawn and trained as an embedding is."""

    def __init__(self, vocabulary: int, width: int):
        output = nn.Embedding(vocabulary, width)
        super().__init__(output)
        self.output = output

    def native_spec(self) -> NativeSpec:
        return NativeSpec("lm_head", parts={"matrix": self.output})


class QuantizedLMHead(LMHead):
    """The output layer with a quantized copy of its weight."""

    def __init__(self, head: LMHead, dtype: torch.dtype):
        super().__init__(head.tied[0])
        self.quantized = (QuantizedLinear(head.weight, dtype),)  # in a tuple, since it is not trained

    def forward(self, function: Callable[..., Tensor], hidden: Tensor, *others: Tensor) -> Tensor:
        return function(hidden, self.quantized[0].dequantized(hidden.dtype), *others)

    def native_spec(self) -> NativeSpec:
        return NativeSpec("lm_head", parts={"matrix": self.quantized[0]})


class TextModel(nn.Module, ABC):
    """A map from tokens to logits. A batch is tokens, targets and a mask, each (B, T): document starts or padding."""

    embedding: nn.Embedding
    lm_head: LMHead
    partitioned = False
    """Whether a weight is whole only while its module computes, as in DeepSpeed's stage 3."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(_drop_shared)
        self.register_load_state_dict_pre_hook(_restore_shared)

    @abstractmethod
    def init_state(self, batch: int) -> Any:
        """Return the state before the first token; None where there is no state."""

    def check_state(self, state: Any, empty: Any) -> None:
        """Raise StateError, which names the tensor, unless `state` can be one of this model; `empty` is the state
        before the first token of as many rows."""
        assert state is None and empty is None

    @abstractmethod
    def forward(self, tokens: Tensor, *others: Any) -> Any:
        """Return logits (B, T, V), and the state after where there is one."""

    @abstractmethod
    def hidden_states(self, tokens: Tensor, *others: Any) -> Any:
        """Return the last hidden states (B, T, width), and the state after where there is one."""

    @abstractmethod
    def loss(
        self, tokens: Tensor, targets: Tensor, mask: Tensor | None = None, state: Any = None, segment: int | None = None
    ) -> tuple[Tensor, Any]:
        """Return the summed -log p of the targets, read from `state`, and the state after. With `segment`, activations
        of that many tokens are held at once."""

    @abstractmethod
    def token_nll(
        self, tokens: Tensor, targets: Tensor, mask: Tensor | None = None, state: Any = None
    ) -> tuple[Tensor, Any]:
        """Return -log p of each target (B, T), 0 where ignored, and the state after; without gradients."""

    @abstractmethod
    def compile_blocks(self) -> None:
        """Compile the computation from tokens to hidden states by torch.compile."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (..., V) of hidden states (..., width), in float32 at least."""
        return self.lm_head(logits_in_float32, hidden)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw normal weights of std width^-1/2; what adds to the residual stream begins at 0, whatever the depth."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=EMBEDDING_STD)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.0 if name.endswith("out_proj") else module.in_features**-0.5)
            elif isinstance(module, ShortConvolution):
                module.init_weights()


def count_parameters(model: nn.Module) -> int:
    """Return the number of trained weights."""
    return sum(weight.numel() for weight in model.parameters())


def _shared_names(model: nn.Module) -> dict[str, str]:
    """Return the duplicate names of weights that several modules share, each with the first name."""
    first: dict[int, str] = {}
    weights = model.named_parameters(remove_duplicate=False)
    return {name: known for name, weight in weights if (known := first.setdefault(id(weight), name)) != name}


def _drop_shared(model: nn.Module, weights: dict[str, Any], prefix: str, *_: Any) -> None:
    """Drop duplicates of shared weights from a state dict, so that a file of weights holds each number once."""
    for name in _shared_names(model):
        del weights[prefix + name]


def _restore_shared(model: nn.Module, weights: dict[str, Any], prefix: str, *_: Any) -> None:
    """Add duplicates of shared weights to a state dict, before it is loaded, for all modules that share them."""
    for name, first in _shared_names(model).items():
        if prefix + first in weights:
            weights[prefix + name] = weights[prefix + first]
