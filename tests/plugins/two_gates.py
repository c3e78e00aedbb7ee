"""A recurrence with two gates of its own, as a user would write it: S_t = a_t S_(t-1) + b_t k_t v_t^T, y_t = q_t S_t.

a is a number for each channel of the keys, b one for each head. B batch, H heads, T time, D channels.
"""

from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from lmlong import recipe
from lmlong.attention.base import CausalAttention
from lmlong.attention.inputs import NOTHING, Gate, Inputs


class TwoGatesState(NamedTuple):
    S: Tensor  # (B, H, D, D)


class TwoGates(CausalAttention[TwoGatesState]):
    class Options(recipe.Options):
        """The gates of attention: two_gates."""

        memory: float = Field(100.0, gt=1)
        """Tokens after which 1/e of the state is left, before training."""

    def __init__(self, heads: int, head_dim: int, value_dim: int, options: Options = Options()):  # noqa: B008
        super().__init__()
        self.heads, self.head_dim, self.value_dim = heads, head_dim, value_dim
        self.inputs = {
            "decay": Gate("decay_gate", "log_sigmoid", torch.full((heads, head_dim), options.memory - 1).log()),
            "beta": Gate("write_gate", "sigmoid", torch.zeros(heads)),
        }

    def init_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> TwoGatesState:
        dtype = torch.promote_types(dtype, torch.float32)
        return TwoGatesState(torch.zeros(batch, self.heads, self.head_dim, self.value_dim, device=device, dtype=dtype))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: TwoGatesState,
        document_starts: Tensor | None = None,
        inputs: Inputs = NOTHING,
    ) -> tuple[Tensor, TwoGatesState]:
        S, outputs = state.S, []
        q, k = (torch.nn.functional.normalize(x.to(S.dtype), dim=-1) for x in (q, k))
        keep, write = inputs["decay"].to(S.dtype).exp(), k * inputs["beta"].to(S.dtype)[..., None]
        for t in range(q.shape[2]):
            if document_starts is not None:
                S = S.masked_fill(document_starts[:, t, None, None, None], 0)
            S = S * keep[:, :, t, :, None] + write[:, :, t, :, None] * v[:, :, t, None, :].to(S.dtype)
            outputs.append((q[:, :, t, None] @ S)[:, :, 0])
        return torch.stack(outputs, dim=2).to(v.dtype), TwoGatesState(S)

    def reference(
        self, q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None = None, inputs: Inputs = NOTHING
    ) -> Tensor:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
        time, total = q.shape[2], inputs["decay"].cumsum(2)
        past = torch.ones(time, time, dtype=torch.bool, device=q.device).tril()
        if document_starts is not None:
            document = document_starts.cumsum(1)
            past = past & (document[:, None, :, None] == document[:, None, None, :])
        decay = (total[:, :, :, None] - total[:, :, None]).masked_fill(~past[..., None], -torch.inf).exp()
        weights = torch.einsum("bhtd,bhtsd,bhsd->bhts", q, decay.to(q.dtype), k)
        return (weights * inputs["beta"][:, :, None].to(q.dtype)) @ v


ATTENTIONS = {"two_gates": TwoGates}
