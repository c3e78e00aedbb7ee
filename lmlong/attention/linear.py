"""Kernel linear attention: a feature map, an optional forget gate, and the causal scan.

B batch, H heads, T time.
"""

import torch
from torch import Tensor

from lmlong.attention import scan
from lmlong.attention.contract import CausalAttention, at_least_float32
from lmlong.attention.features import FeatureMap
from lmlong.attention.native.engine import attend
from lmlong.attention.scan import ScanState
from lmlong.attention.spans import Attend


class LinearAttention(CausalAttention[ScanState]):
    """sim(q, k) = phi(q) . phi(k), whose whole past fits in S and z."""

    log_decay: Tensor | None

    sums = torch.float32
    """The least precise type that S and z are kept in: without a gate, float32 takes no more 1s after 2^24 of them."""

    def __init__(self, heads: int, width: int, features: FeatureMap, decay: str = "none"):
        super().__init__()
        self.heads, self.width, self.feature_map = heads, width, features
        self.largest_scale, self.turned_by_position = features.largest_scale, features.turned_by_position
        self.gated = decay == "learned"
        self.scan_by: Attend = attend
        fixed = placed(torch.log1p(-1 / memory_lengths(heads))) if decay == "fixed" else None
        self.register_buffer("log_decay", fixed, persistent=False)

    def init_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> ScanState:
        shape = (batch, self.heads, self.feature_map.features)
        precise = torch.promote_types(dtype, self.sums)
        return ScanState(
            S=torch.zeros(*shape, self.width, device=device, dtype=precise),
            z=torch.zeros(*shape, device=device, dtype=precise),
        )

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: ScanState,
        starts: Tensor | None = None,
        log_decay: Tensor | None = None,
    ) -> tuple[Tensor, ScanState]:
        log_decay = self._decay(q, log_decay)
        if q.shape[2] > 1:
            return scan.prefill(q, k, v, state, starts, log_decay, self.feature_map, self.scan_by)
        with _in_its_own_type(q):
            fq, fk = self.feature_map.query(q), self.feature_map.key(k)
            y, state = scan.step(fq, fk, v.to(fq.dtype), state, starts, log_decay)
        return y.to(v.dtype), state

    def denominators(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: ScanState,
        starts: Tensor | None = None,
        log_decay: Tensor | None = None,
    ) -> Tensor:
        """What the outputs of `prefill` were divided by, (B, H, T)."""
        with _in_its_own_type(q):
            fq, fk = self.feature_map.query(q), self.feature_map.key(k)
            return scan.denominators(fq, fk, v.to(fq.dtype), state, starts, self._decay(q, log_decay))

    def reference(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None = None, log_decay: Tensor | None = None
    ) -> Tensor:
        fq, fk = self.feature_map.query(q), self.feature_map.key(k)
        return scan.quadratic(fq, fk, v, starts, self._decay(q, log_decay))

    def state_numbers(self, tokens: int) -> int:
        return self.heads * self.feature_map.features * (self.width + 1)

    def _decay(self, q: Tensor, learned: Tensor | None) -> Tensor | None:
        """The log decay of each token: the one that was learned, the fixed one, or none."""
        if self.log_decay is None:
            return learned
        return self.log_decay.to(at_least_float32(q.dtype))[None, :, None].expand(q.shape[:3])


def _in_its_own_type(like: Tensor) -> torch.autocast:
    """Products computed in the type of their factors: autocast would round the float32 sums to bfloat16."""
    return torch.autocast(like.device.type, enabled=False)


def memory_lengths(heads: int) -> Tensor:
    """Tokens after which a head has forgotten all but 1/e, on a CPU: from 2 to 8,192, evenly on a log scale."""
    return torch.logspace(1, 13, heads, base=2.0, device="cpu") if heads > 1 else torch.tensor([1024.0], device="cpu")


def placed(found: Tensor) -> Tensor:
    """A tensor of a CPU, on the device where tensors are made now: where there is no memory to find it in, torch would
    load its compiler for that, a second long."""
    return found.to(torch.get_default_device())
