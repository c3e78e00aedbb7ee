"""What remains of a text that was read: all that is needed in order to go on with it, of a size that does not grow.

B rows.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmlong.attention.contract import tensors
from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.model.states import rebuilt

PIECE = 2048
"""Tokens that are read at once: a text of any length takes the memory of one piece."""

RECENT = 1024
"""How many of the last tokens are remembered as such, for whatever looks back at the text itself."""

NONE = -1
"""Stands for a token where there is none yet."""


class Memory(NamedTuple):
    """A text up to its last token, which is known but not read yet: what follows it is the next question."""

    state: ModelState  # of all tokens but the last
    last: Tensor  # (B,) the last token
    recent: Tensor  # (B, RECENT) the last tokens, this one too; NONE before the beginning
    total: Tensor  # (B,) tokens in all, this one too


def read(model: LanguageModel, pieces: Iterable[Sequence[int]], memory: Memory | None = None) -> Memory:
    """Continue one row over tokens that come in pieces of any size."""
    held: list[int] = []
    for piece in pieces:
        held.extend(piece)
        while len(held) > PIECE:
            memory = _advance(model, held[:PIECE], memory)
            held = held[PIECE:]
    memory = _advance(model, held, memory) if held else memory
    assert memory is not None, "nothing to read"
    return memory


@torch.inference_mode()
def _advance(model: LanguageModel, tokens: list[int], memory: Memory | None) -> Memory:
    """Read the token that was last, and the new ones but for the last of them."""
    new = torch.tensor([tokens], device=model.embedding.weight.device)
    if memory is None:
        nothing = torch.full((1, RECENT), NONE, device=new.device)
        memory = Memory(model.init_state(1), new[:, :1], nothing, torch.zeros_like(new[:, 0]))
        unread = new[:, :-1]
    else:
        unread = torch.cat([memory.last[:, None], new[:, :-1]], dim=1)
    state = model.read(unread, memory.state)[1] if unread.shape[1] else memory.state
    recent = torch.cat([memory.recent, new], dim=1)[:, -RECENT:].clone()
    return Memory(state, new[:, -1].clone(), recent, memory.total + new.shape[1])


@torch.inference_mode()
def ask(model: LanguageModel, memory: Memory) -> tuple[Tensor, ModelState]:
    """Logits (B, vocabulary) of what follows, and the state with the last token read."""
    return model.step(memory.last, memory.state)


@torch.inference_mode()
def followed(memory: Memory, state: ModelState, token: Tensor) -> Memory:
    """The memory with one more token (B,), whose question gave `state`."""
    recent = torch.cat([memory.recent[:, 1:], token[:, None]], dim=1)
    return Memory(state, token, recent, memory.total + 1)


def repeated(memory: Memory, times: int) -> Memory:
    """Each row so many times, one beside the other."""
    return rebuilt(memory, iter([tensor.repeat_interleave(times, dim=0) for tensor in tensors(memory)]))


def bytes_of(state: Any) -> int:
    """The memory that all tensors of a state take."""
    return sum(tensor.nbytes for tensor in tensors(state))
