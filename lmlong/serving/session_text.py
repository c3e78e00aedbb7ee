"""The text that a session adds to its parent's: who wrote it, and how likely the model's tokens were.

V vocabulary.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.session import Session, after_tokens, append_token, logits_not_finite, next_logits
from lmlong.inference.state_table import Piece, Place
from lmlong.inference.unread import UnreadText
from lmlong.serving.api_errors import shutting_down
from lmlong.serving.request import WrittenToken
from lmlong.serving.writer import written_token

Author = Literal["reader", "model", "state"]
"""`state`: unknown, since the text is the end of that of an uploaded state."""


class Passage(NamedTuple):
    """Consecutive text of one author."""

    by: Author
    text: bytes
    tokens: tuple[WrittenToken, ...] = ()
    """Those of the model, if their likelihoods were asked for. The first may begin with the end of the text before."""


class OwnText(NamedTuple):
    """What a session adds to its parent."""

    before: str
    """The end of the text of an uploaded state, if it begins with one."""
    repeated: int
    """Bytes of the pieces that are the end of the parent's text, which it had not read."""
    pieces: Sequence[Piece]
    unread: UnreadText
    first: Place | None
    """The place before the first piece of the model, if the likelihoods of its tokens are wanted."""

    def passages(self, trained: TrainedLanguageModel, alternatives: int, ended: Callable[[], bool]) -> list[Passage]:
        """Return the passages. Tokens have the likelihoods of `alternatives` others. `ended`: whether to give up."""
        passages = [Passage("state", self.before.encode("utf-8", "surrogatepass"))] if self.before else []
        session, repeated = self.first.session if self.first else None, self.repeated
        is_read = False
        last = Piece("wrote" if self.unread.chosen else "read", self.unread.chosen)
        for by_model, pieces in groupby([*self.pieces, last], lambda piece: piece.kind == "wrote"):
            text, shown = b"", list[WrittenToken]()
            is_read = is_read or by_model
            for piece in pieces:
                if ended():
                    raise shutting_down()
                likelihoods = list[WrittenToken]()
                if session is not None and is_read and by_model:
                    session, likelihoods = _likelihoods(trained, session, piece.tokens, alternatives)
                elif session is not None and is_read:
                    session = piece.read(trained.model, session)
                for number, token in enumerate(piece.tokens):
                    data = trained.tokenizer.decode_bytes([token])
                    text += data[repeated:]
                    if data[repeated:] or not data:
                        shown += likelihoods[number : number + 1]
                    repeated = max(0, repeated - len(data))
                if piece is last and not piece.tokens:
                    text += self.unread.pending[repeated:]
            if text:
                passages.append(Passage("model" if by_model else "reader", text, tuple(shown)))
        return passages


@torch.inference_mode()
def _likelihoods(
    trained: TrainedLanguageModel, session: Session, tokens: Sequence[int], alternatives: int
) -> tuple[Session, list[WrittenToken]]:
    """Return the session after tokens of the model, and their likelihoods."""
    model, predicted = trained.model, list[Tensor]()
    if session.state.learned is None:
        read = torch.tensor([[session.last, *tokens[:-1]]], device=trained.device)
        hidden, state = model(read, session.state)
        predicted, session = [*model.logits(hidden[0])], after_tokens(session, tokens, state)
    else:  # which did not learn from these tokens
        for token in tokens:
            logits, state = next_logits(model, session)
            predicted.append(logits[0])
            session = append_token(session, state, token)
    written = []
    for token, logits in zip(tokens, predicted, strict=True):
        log_probabilities = logits.double().log_softmax(-1)
        if log_probabilities.isnan().any():
            raise logits_not_finite(model, session.recent)
        written.append(written_token(token, log_probabilities, alternatives))
    return session, written
