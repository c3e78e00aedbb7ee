"""The bits of each token of a text, read along a state as the text arrives. N tokens."""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from lmlong.inference import session as sessions
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.session import Session, even_pieces
from lmlong.inference.unread import Encoding, UnreadText
from lmlong.model.device import Precision, autocast
from lmlong.model.state import at_least_float32

PIECE, REST = 1024, 256
"""Tokens read at a time, and of the remainder at the end. More are no faster, and pieces of any length would fragment
the memory."""


class TokenBits(NamedTuple):
    """Consecutive tokens, and the bits of each given all tokens before it."""

    tokens: np.ndarray  # (N,) int64
    bits: np.ndarray  # (N,) float64


def begin(trained: TrainedLanguageModel) -> Session:
    """Return the session at the beginning of a document."""
    return sessions.first(trained.model, trained.tokenizer.bos, trained.learn)


class TextReader:
    """Reads one text along a state, in any pieces: tokens that the next bytes can change are held back."""

    def __init__(self, trained: TrainedLanguageModel, session: Session | None = None, precision: Precision = "32"):
        self._trained, self._precision = trained, precision
        self.session = begin(trained) if session is None else session

    def read(self, text: Iterable[str], more: bool) -> Iterator[TokenBits]:
        """Iterate over the tokens of the next text. Without `more`, none are held back."""
        encoding = Encoding(self._trained.tokenizer, self.session.unread, text, heal=more)
        read = self.session._replace(unread=UnreadText())
        for piece in _pieces(encoding):
            read, token_bits = _score(self._trained, piece, read, self._precision)
            self.session = read
            yield token_bits
        self.session = read._replace(unread=encoding.unread)

    def read_end(self) -> TokenBits:
        """Score the token that ends a document."""
        self.session, token_bits = _score(self._trained, [self._trained.tokenizer.eos], self.session, self._precision)
        return token_bits


def _pieces(encoding: Encoding) -> Iterator[list[int]]:
    for piece in even_pieces(encoding, PIECE):
        yield from [piece] if len(piece) == PIECE else even_pieces([piece], REST)


@torch.inference_mode()
def _score(
    trained: TrainedLanguageModel, tokens: list[int], session: Session, precision: Precision
) -> tuple[Session, TokenBits]:
    with autocast(trained.device, precision):
        session, nll = sessions.score_tokens(trained.model, tokens, session)
    session = session._replace(state=at_least_float32(session.state))
    bits = nll[0].cpu().double().numpy() / math.log(2)
    return session, TokenBits(np.array(tokens, dtype=np.int64), bits)
