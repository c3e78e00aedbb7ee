"""What every model of text is, whether it predicts what comes next or what was hidden: all that training asks of it.

B batch, T time, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lmlong.model.convolution import ShortConvolution
from lmlong.model.loss import scores

EMBEDDED = 0.02
"""Deviation of the numbers that a token begins as."""


class Output(nn.Module):
    """Holds vectors against the embeddings of all tokens, which it shares with the input."""

    def __init__(self, embedding: nn.Embedding):
        super().__init__()
        self.tied = (embedding,)  # in a tuple, so that its weights are not listed twice

    def forward(self, use: Callable[..., Tensor], hidden: Tensor, *others: Tensor) -> Tensor:
        return use(hidden, self.tied[0].weight, *others)


class TextModel(nn.Module, ABC):
    """Reads batches of tokens and targets (B, T), and marks (B, T) of a meaning of its own."""

    embedding: nn.Embedding
    output: Output
    partitioned = False
    """Whether weights are whole only while their module is at work, as under DeepSpeed's stage 3."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(_name_once)
        self.register_load_state_dict_pre_hook(_name_again)

    @abstractmethod
    def init_state(self, batch: int) -> Any:
        """What it remembers before it has read anything."""

    @abstractmethod
    def read(self, *arguments: Any, **named: Any) -> Any:
        """The vectors that predict, and what else it has after reading."""

    @abstractmethod
    def lose(
        self, tokens: Tensor, targets: Tensor, marks: Tensor | None, segment: int | None, state: Any
    ) -> tuple[Tensor, Any]:
        """The summed nats of the targets read from `state`, and the state after; `segment` tokens are held at once."""

    @abstractmethod
    def nats(self, tokens: Tensor, targets: Tensor, marks: Tensor | None) -> Tensor:
        """The nats of each target (B, T), 0 where ignored; for evaluation, without gradients."""

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., width) -> (..., V), in float32 at least."""
        return self.output(scores, hidden)

    @torch.no_grad()
    def initialise(self) -> None:
        """Normal weights of deviation width^-1/2; what enters the residual stream begins at 0, so depth is free."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=EMBEDDED)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.0 if name.endswith("project_out") else module.in_features**-0.5)
            elif isinstance(module, ShortConvolution):
                nn.init.normal_(module.weight, std=0.1)
                module.weight[:, -1] += 1  # it begins near to passing the token on as it is


def _other_names(model: nn.Module) -> dict[str, str]:
    """Every further name of a weight that several modules share, with its first one."""
    first: dict[int, str] = {}
    weights = model.named_parameters(remove_duplicate=False)
    return {name: known for name, weight in weights if (known := first.setdefault(id(weight), name)) != name}


def _name_once(model: nn.Module, weights: dict[str, Any], prefix: str, *_: Any) -> None:
    """Keep shared weights once, under their first name: a file of weights holds each number once."""
    for name in _other_names(model):
        del weights[prefix + name]


def _name_again(model: nn.Module, weights: dict[str, Any], prefix: str, *_: Any) -> None:
    """Give shared weights, before they are loaded, to all who share them."""
    for name, first in _other_names(model).items():
        if prefix + first in weights:
            weights[prefix + name] = weights[prefix + first]
