"""The hidden states of a text, piece by piece in constant memory.

T time.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmlong.inference.session import even_pieces
from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.model.learning import read as reading


class HiddenStates(NamedTuple):
    """Outputs of a model's layers for each token of a text."""

    tokens: Tensor  # (T,) token ids; the first precedes the text: bos, or the last token of a state
    last: Tensor  # (T, width) after the last block and its norm, from which the logits of the next token follow
    blocks: tuple[
        Tensor, ...
    ] = ()  # (T, width) after each block, if requested; downsampled layers have blocks of tokens


def stream(
    model: LanguageModel, tokens: Iterable[Sequence[int]], state: ModelState | None, blocks: bool
) -> Iterator[HiddenStates]:
    """Iterate over the hidden states of tokens, read from `state` or from the empty state."""
    weight = model.embedding.weight
    for piece in even_pieces(tokens):
        read = torch.tensor([piece], device=weight.device)
        outputs = [weight.new_zeros(1, 0, weight.shape[1]) for _ in model.blocks if blocks]
        # not inference mode: its tensors cannot be inputs of a layer that is trained
        with torch.no_grad(), ExitStack() as hooks:
            if blocks:
                hooks.enter_context(model.whole_blocks())
            for layer, _ in enumerate(outputs):
                hooks.callback(model.blocks[layer].register_forward_hook(partial(_keep, outputs, layer)).remove)
            last, state = reading.read(model, read, model.init_state(1) if state is None else state)
        yield HiddenStates(read[0], last[0], tuple(output[0] for output in outputs))


def concat(pieces: Sequence[HiddenStates]) -> HiddenStates:
    """Concatenate the hidden states of consecutive pieces."""
    tokens, last, blocks = zip(*pieces, strict=True)
    return HiddenStates(torch.cat(tokens), torch.cat(last), tuple(map(torch.cat, zip(*blocks, strict=True))))


def _keep(outputs: list[Tensor], layer: int, block: Any, inputs: Any, output: tuple[Tensor, Any]) -> None:
    outputs[layer] = output[0]
