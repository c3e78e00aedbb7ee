"""What stretch of a text a forward pass reads. It is made once, and handed to each block with x.

B batch, T time, P last tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lmlong.model.rope import document_positions
from lmlong.model.sequence_group import SequencePart


class BlockPhase(NamedTuple):
    """The alignment of the tokens of one call with blocks, which must be known before the computation."""

    blocks: int  # maximum number of full blocks in a row
    first: int  # the token that ends the first block, if `even`
    even: bool  # whether blocks end at `first` and each F-th token after it in every row
    fresh: bool  # whether the first block of a document may be among them


def any_phase(factor: int, time: int) -> BlockPhase:
    """Return a phase that describes `time` tokens whatever their alignment is, so that no value has to be read."""
    most = (factor - 1 + time) // factor  # full blocks that may end in them
    return BlockPhase(most, 0, False, True)


def block_phase(factor: int, position: Tensor, document_starts: Tensor | None, time: int) -> BlockPhase:
    """Return the phase of `time` tokens. The first token has `position` (B,) earlier tokens in its document."""
    if document_starts is None:
        before, regular = position.tolist(), True
    else:
        index = document_positions(document_starts, position, time)
        steady = (index - index[:, :1] - torch.arange(time, device=index.device)) % factor == 0
        *before, regular = torch.cat([index[:, 0], steady.all()[None]]).tolist()
    phases = {tokens % factor for tokens in before}
    blocks = (max(phases) + time) // factor
    if not blocks:
        return BlockPhase(0, 0, True, False)
    fresh = document_starts is not None or min(before) < factor
    # for one token both forms are equally fast; using only one of them saves compilations
    even = bool(regular) and len(phases) == 1 and not (fresh and time == 1)
    return BlockPhase(blocks, factor - 1 - max(phases) if even else 0, even, fresh)


class Stretch(NamedTuple):
    """The tokens of all rows that a pass reads, or the blocks of tokens that downsampled layers read."""

    in_document: Tensor  # (B, T) number of earlier tokens in the document
    document_starts: Tensor | None  # (B, T) bool, true at the first token of a document; None if none starts
    last_tokens: Tensor | None = None  # (B, T, P) the last tokens at each token, -1 before its document
    part: SequencePart | None = None  # which part of the rows this process reads; None for all
    phase: BlockPhase | None = None  # None if no layers are downsampled

    def select(self, rows: slice, times: slice) -> "Stretch":
        """Return some tokens of some rows."""
        starts = None if self.document_starts is None else self.document_starts[rows, times]
        return Stretch(self.in_document[rows, times], starts)
