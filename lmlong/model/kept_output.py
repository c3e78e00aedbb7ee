"""The loss of a student that learns from the most probable tokens of its teacher.

The probabilities of all other tokens are merged into one. By the data-processing inequality the divergence of the
merged distributions is a lower bound of the divergence of the whole ones. With the whole vocabulary they are equal.

N tokens, K most probable tokens, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lmlong.model.loss import Softening, scored_sum


class KeptOutput(NamedTuple):
    """The most probable next tokens of a teacher for a batch, from which a student learns."""

    tokens: Tensor  # (B, T, K) int64
    log_q: Tensor  # (B, T, K + 1) their log probabilities, then of all others together; -inf if K = V
    softening: Softening

    def flattened(self) -> "KeptOutput":
        return self._replace(tokens=self.tokens.flatten(0, -2), log_q=self.log_q.flatten(0, -2))

    def between(self, times: slice) -> "KeptOutput":
        return self._replace(tokens=self.tokens[:, times], log_q=self.log_q[:, times])

    def soft_loss(self, logits: Tensor, scored: Tensor, span: slice) -> tuple[Tensor, Tensor]:
        """Return the weighted KL(teacher | student) over the scored tokens of a span, and its gradient for the logits
        (N, V)."""
        share, temperature = self.softening
        tokens, log_q = self.tokens[span], self.log_q[span].to(logits.dtype)
        log_p = (logits / temperature).log_softmax(-1)
        merged = merge(log_p, tokens)
        q = log_q.exp()
        divergence = torch.where(q > 0, q * (log_q - merged), 0).sum(-1)
        # d / d(logit): p - q for the kept tokens; for the others p - q_rest p / p_rest
        kept = merged[:, :-1].exp() - q[:, :-1]
        log_ratio = torch.where(q > 0, log_q - merged, -torch.inf)[:, -1:]
        dlogits = log_p.exp().sub_((log_p + log_ratio).exp_()).scatter_(-1, tokens, kept)
        return share * temperature**2 * scored_sum(divergence, scored), dlogits.mul_(
            scored[:, None] * (share * temperature)
        )


def most_probable(log_p: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the most probable tokens (N, K) of distributions (N, V), and the merged distributions (N, K + 1)."""
    tokens = log_p.topk(min(count, log_p.shape[-1])).indices
    return tokens, merge(log_p, tokens)


def merge(log_p: Tensor, tokens: Tensor) -> Tensor:
    """Return the log probabilities (N, K + 1) of some tokens (N, K), and last that of all others, given those of all
    tokens (N, V)."""
    rest = log_p.scatter(-1, tokens, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([log_p.gather(-1, tokens), rest], dim=-1)
