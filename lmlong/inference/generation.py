"""Streaming generation: the continuations of a session, piece by piece."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lmlong.data.tokenizers.base import Tokenizer
from lmlong.errors import UsageError
from lmlong.inference.continuation import Continuation
from lmlong.inference.decoder import Decoder
from lmlong.inference.drafts import Drafts
from lmlong.inference.healing import heal, only_beginning_with
from lmlong.inference.rewind import Rewind
from lmlong.inference.sampling import Sampler
from lmlong.inference.session import Session, logits_not_finite
from lmlong.model.finite import NotFinite
from lmlong.model.language_model import LanguageModel
from lmlong.model.state import concat_states, state_row


class Generation:
    """The continuations of all rows of a session in parallel, as a stream of pieces of text."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        session: Session,
        sampler: Sampler,
        max_tokens: int | None,
        stop: Sequence[str] = (),
        keep: bool = False,
        drafts: Drafts | None = None,
    ):
        check_end(max_tokens, stop)
        self.model, self.tokenizer, self.sampler = model, tokenizer, sampler
        self.keep, self.drafts = keep, drafts
        self._decoder = Decoder(model, session, drafts)
        self.rows = [Continuation(tokenizer, max_tokens, stop) for _ in session.last]
        self._rewind = Rewind(tokenizer, session) if len(self.rows) == 1 else None

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """Iterate over (row, piece of text) until every row has ended."""
        rows, eos, healed = self.rows, self.tokenizer.eos, False
        while writing := [number for number, row in enumerate(rows) if row.end is None]:
            if not healed:
                self._heal()
                healed = True
            logits = self._decoder.next_logits()
            allowed = only_beginning_with(self.tokenizer, [row.head for row in rows], logits)
            recent = self.session.recent if self.sampler.needs_recent else None
            try:
                sampled = self.sampler(allowed, recent).to(logits.device)
            except NotFinite:
                raise logits_not_finite(self.model, self.session.recent) from None
            tokens = sampled.tolist()
            log_probs = _log_probabilities(logits, sampled).tolist() if self.keep else [None] * len(rows)
            if any(tokens[number] != eos for number in writing):
                self._decoder.append(tokens)
            for number in writing:
                if piece := self._take(rows[number], tokens[number], log_probs[number]):
                    yield number, piece

    @property
    def session(self) -> Session:
        """The session after all tokens so far."""
        return self._decoder.session()

    def finished(self) -> Session:
        """Return the session of a single row after exactly the text that was printed."""
        assert self._rewind is not None, "several rows"
        return self._rewind.session(self.model, self.rows[0].dropped)

    def _heal(self) -> None:
        """Read the unread text of each row up to where its next token begins."""
        session = self.session
        if not session.unread.pending.shape[1]:
            return
        rows = [state_row(session, row) for row in range(len(self.rows))]
        starts = [heal(self.model, self.tokenizer, row, self.sampler, number) for number, row in enumerate(rows)]
        healed = concat_states([start.session for start in starts])
        self._decoder = Decoder(self.model, healed, self.drafts)
        if self._rewind:
            self._rewind.add(starts[0].cover.tokens, True, lambda: healed)
        for row, start in zip(self.rows, starts, strict=True):
            row.head = start.cover.head

    def _take(self, row: Continuation, token: int, log_probability: float | None) -> str:
        piece = row.take(token, log_probability)
        if self._rewind and row.end != "eos":
            self._rewind.add([token], False, lambda: self.session, row.held)
        return piece


def check_end(max_tokens: int | None, stop: Sequence[str]) -> None:
    """Refuse an invalid number of tokens or invalid stop strings."""
    if max_tokens is not None and max_tokens < 0:
        raise UsageError(f"max_tokens: {max_tokens} is negative. Give a number of tokens, or None for no end.")
    if isinstance(stop, str):
        raise UsageError(f"stop: {stop!r} is one string. Give a list of strings.")
    if "" in stop:
        raise UsageError("stop: an empty string is everywhere. Name the strings to stop at.")


@torch.inference_mode()
def _log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
