"""The base class of text models, whether they predict the next token or masked ones.

B batch, T time, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmlong import recipe
from lmlong.attention.compiling import compiled
from lmlong.attention.device_policy import FollowsPolicy
from lmlong.model.block import ResidualBlock
from lmlong.model.layers import BFloat16Linear, GroupedLinear, Linear, RMSNorm, quantized_linear, rounded_weight
from lmlong.model.loss import chunked_cross_entropy, in_float32, logits_in_float32, token_nll
from lmlong.model.ngram_embedding import tables_of
from lmlong.model.quantization import GroupFormat, WeightFormat, Weights, output_format
from lmlong.model.short_conv import ShortConvolution

EMBEDDING_STD = 0.02


class LMHead(FollowsPolicy):
    """The output layer. Its weight is an embedding: the input embedding if tied."""

    is_compiled = False
    """Whether torch.compile runs the loss of a chunk of logits."""

    def __init__(self, output: nn.Embedding, has_mask_token: bool = False):
        super().__init__()
        self.output, self.has_mask_token = output, has_mask_token
        self.rounding: GroupFormat | None = None  # as that of `Linear`

    @property
    def weight(self) -> Tensor:
        """The weight (V, width)."""
        return self.output.weight

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix that hidden states of `dtype` are multiplied by. It lacks the last row of an encoder's
        embedding: the mask token is never a target."""
        return self.weight[:-1] if self.has_mask_token else rounded_weight(self.weight, self.rounding)

    def forward(
        self,
        hidden: Tensor,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        targets: Tensor | None = None,
        reduction: Literal["sum", "none"] = "sum",
    ) -> Tensor:
        """Return logits (..., V) of hidden states (..., width), in at least float32. With targets, return their summed
        -log p, or with `reduction="none"` each -log p, without gradients. Only the logits of one chunk are held in
        memory. Any other `loss` is a function of the hidden states and the weight, which DeepSpeed's stage 3 gathers
        only while this computes."""
        if loss is not None:
            return loss(hidden, self.matrix(hidden.dtype))
        if targets is None:
            return self.logits(hidden)
        policy = self.policy_for(hidden)
        if reduction == "none":
            return token_nll(hidden, self.logits, self.rows, targets, policy)
        return chunked_cross_entropy(hidden, self.matrix(hidden.dtype), targets, policy, self.is_compiled)

    @property
    def rows(self) -> int:
        """The number of logits of a token."""
        return len(self.weight) - self.has_mask_token

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (..., V), in at least float32."""
        return logits_in_float32(hidden, self.matrix(hidden.dtype))


class QuantizedLMHead(LMHead):
    """The output layer with a quantized copy of its weight."""

    def __init__(self, head: LMHead, weight_format: WeightFormat):
        FollowsPolicy.__init__(self)
        # in a tuple, so that the copy of a tied weight is not counted among the weights
        self.quantized = (quantized_linear(head.weight, weight_format),)

    @property
    def rows(self) -> int:
        return self.quantized[0].outputs

    def logits(self, hidden: Tensor) -> Tensor:
        return in_float32(self.quantized[0](hidden))

    def matrix(self, dtype: torch.dtype) -> Tensor:
        return self.quantized[0].dequantized(dtype)


class TextModel(FollowsPolicy, ABC):
    """A map from tokens to hidden states, and from these to logits or a loss. A batch is tokens, targets and a mask
    (document starts or padding), each (B, T)."""

    blocks: Sequence[ResidualBlock]
    norm: RMSNorm
    lm_head: LMHead
    weight_format: Weights = "32"
    """The format of the weight matrices."""
    labels: int | None = None
    """The number of labels that its output layer chooses from; None if it predicts tokens."""
    embedding_growth: Tensor | None
    """How many times as large as a new one the embedding was that labels are learned from."""
    partitioned = False
    """Whether weights are partitioned and gathered only while their module computes, as in DeepSpeed's stage 3."""
    is_compiled = False
    """Whether torch.compile runs blocks that read more than one token."""
    step_is_compiled = False
    """Whether it runs blocks that read one token."""

    def __init__(self, options: recipe.Model, embeddings: int, activation_checkpointing: bool):
        super().__init__()
        self.register_state_dict_post_hook(_drop_shared)
        self.register_load_state_dict_pre_hook(_restore_shared)
        self.activation_checkpointing = activation_checkpointing
        self.embedding = nn.Embedding(embeddings, options.width)
        self.register_buffer("embedding_growth", None)
        # scaled to about 1, otherwise the first blocks would drown it; logits need a small embedding
        self.embedding_scale = options.embedding_scale or options.width**0.5
        self.downsampled_layers = options.downsampled_layers

    @abstractmethod
    def init_state(self, batch: int) -> Any:
        """Return the state before the first token; None for a model without state."""

    def check_state(self, state: Any, empty: Any) -> None:
        """Raise StateError, which names the tensor, unless `state` is a valid state of this model. `empty` is the state
        before the first token, for the same number of rows."""
        assert state is None and empty is None

    @abstractmethod
    def forward(self, tokens: Tensor, state: Any = None, mask: Tensor | None = None) -> tuple[Tensor, Any]:
        """Return the last hidden states (B, T, width), starting from `state`, and the state after."""

    @abstractmethod
    def piece(self, rows: int) -> int:
        """Return how many tokens of each row to read at once."""

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the summed -log p of the targets (...) after hidden states (..., width)."""
        return self.lm_head(hidden, targets=targets)

    def compile_blocks(self) -> None:
        """Let torch.compile run the blocks, and the loss of each chunk of logits."""
        self.is_compiled = self.lm_head.is_compiled = True

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Within this context, blocks run uncompiled, so that the hooks of their parts are called."""
        before, self.is_compiled = self.is_compiled, False
        try:
            yield
        finally:
            self.is_compiled = before

    def call_for(self, time: int) -> Callable[..., Any]:
        """Return what a block and its inputs of `time` tokens are handed to: the block's own call, or its compiled
        form; with activation checkpointing, one that computes it again in the backward pass."""
        compiles = self.step_is_compiled if time == 1 else self.is_compiled
        call = compiled(type(self.blocks[0]).forward, time == 1) if compiles else nn.Module.__call__
        if self.activation_checkpointing and torch.is_grad_enabled():
            return partial(checkpoint, call, use_reentrant=False)
        return call

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (..., V) of hidden states (..., width), in at least float32."""
        return self.lm_head(hidden)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw normal weights of std width^-1/2. Projections into the residual stream start at 0, at any depth."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=EMBEDDING_STD)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.0 if name.endswith("out_proj") else module.in_features**-0.5)
            elif isinstance(module, ShortConvolution):
                module.init_weights()


def round_weights(model: TextModel, rounding: GroupFormat | None) -> None:
    """Let a model compute with the values that its matrices have once `quantize` has stored them in a format, or with
    the weights as they are. Gradients pass to the weights unchanged."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.rounding = rounding
    model.lm_head.rounding = rounding and output_format(rounding)


def quantize(model: TextModel, weight_format: WeightFormat) -> None:
    """Quantize all weight matrices of a model, so that each token reads less memory. With `int8` and `int4`, products
    round their inputs to int8; with `int4`, the output matrix is in int8."""
    model.weight_format = weight_format
    for name, _ in list(model.named_parameters()):
        quantize_matrix(model, weight_format, name)
    model.lm_head = QuantizedLMHead(model.lm_head, output_format(weight_format))


def quantize_matrix(model: TextModel, weight_format: WeightFormat, name: str) -> None:
    """Quantize the weight of this name, if it is that of a linear layer."""
    path = name.removesuffix(".weight")
    if path != name and isinstance(child := model.get_submodule(path), nn.Linear):
        parent, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, quantized_linear(child.weight, weight_format))


def count_parameters(model: nn.Module) -> int:
    """Return the number of trained weights."""
    quantized = (layer for layer in model.modules() if isinstance(layer, (BFloat16Linear, GroupedLinear)))
    matrices = sum(layer.outputs * layer.inputs for layer in quantized)
    weights = sum(weight.numel() for weight in model.parameters())
    return weights + matrices + count_in_tables(model)


def count_in_tables(model: nn.Module) -> int:
    """Return the number of trained weights in tables of n-grams, of which a token uses only a few."""
    tables = tables_of(model)
    return 0 if tables is None else tables.table.numel()


def training_operations(model: TextModel) -> int:
    """Return the operations that a training step needs for a token: 6 for each weight of a matrix that the token is
    multiplied by. What attention adds, and what activation checkpointing repeats, is not counted."""
    layers = (module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    return 6 * (sum(layers) + model.lm_head.weight.numel())


def describe_parameters(model: nn.Module) -> str:
    """Return the number of trained weights in words, with that of tables."""
    in_tables = count_in_tables(model)
    return f"{count_parameters(model):,} parameters{f' ({in_tables:,} in tables of n-grams)' if in_tables else ''}"


def _shared_names(model: nn.Module) -> dict[str, str]:
    """Return the duplicate names of weights that several modules share, mapped to the first name."""
    first: dict[int, str] = {}
    weights = model.named_parameters(remove_duplicate=False)
    return {name: first[id(weight)] for name, weight in weights if first.setdefault(id(weight), name) != name}


def _drop_shared(model: nn.Module, weights: dict[str, Any], prefix: str, *_: Any) -> None:
    """Drop duplicates of shared weights from a state dict, so that a file of weights holds each number once."""
    for name in _shared_names(model):
        del weights[prefix + name]


def _restore_shared(model: nn.Module, weights: dict[str, Any], prefix: str, *_: Any) -> None:
    """Add duplicates of shared weights to a state dict, before it is loaded, for all modules that share them."""
    for name, first in _shared_names(model).items():
        if prefix + first in weights:
            weights[prefix + name] = weights[prefix + first]
