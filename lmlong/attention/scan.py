"""The causal scan by torch and native kernels, span by span, as one autograd function.

The inputs, the outputs and the states between spans are saved for the backward pass. Everything else, including
features, is recomputed span by span from the last to the first, while it is in cache.

The parts of the time axis have these names:

| name | tokens | meaning |
|---|---|---|
| piece | 4096 (scored) or 2048 (a prompt) on a CPU | part of a long text that is read at once (`LanguageModel.piece`) |
| segment | `training.segment` (model/segments.py) | part of a training sequence whose activations fit in memory |
| span | 512 (`SPAN`) on a CPU, what memory allows on a GPU | part of a sequence that one call of a kernel computes |
| part | a quarter of a span (`PARTS`, delta/chunk.py) | chunks of the delta rule that a GPU computes at once |
| chunk | 64 (`CHUNK_SIZE`, chunks.py) | part of a span: attention within it, the state from one to the next |
| tile | 16 (`TILE`, native/simd.h) | the chunk of C++ kernels |
| tile | 64 (`TILE`, linear/triton/tiles.py) | the chunk of Triton kernels |
| segment | up to 1024 (`MAX_SEGMENT`, linear/triton/operation.py) | the tiles of one program in Triton |

B batch, H heads, T time, F features, V value dim.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from lmlong.attention.device_policy import DevicePolicy
from lmlong.attention.feature_maps import FeatureMap

SPAN = 512
"""Tokens in a span on a CPU: few enough that temporaries stay in cache."""


def span_tokens(v: Tensor, policy: DevicePolicy, token_bytes: int) -> int:
    """Return the number of tokens in a span: SPAN, or as many as the memory for temporary tensors allows, of which each
    token of a head needs `token_bytes`."""
    if policy.span_bytes is None:
        return SPAN
    return max(SPAN, policy.span_bytes // (v.shape[0] * v.shape[1] * token_bytes) // SPAN * SPAN)


class ScanInputs(NamedTuple):
    """The inputs of a scan over a text."""

    q: Tensor  # (B, H, T, K)
    k: Tensor  # (B, H, T, K)
    v: Tensor  # (B, H, T, V)
    document_starts: Tensor | None = None  # (B, T)
    log_decay: Tensor | None = None  # (B, H, T), or (B, H, T, F) by channel (linear attention only)
    beta: Tensor | None = None  # (B, H, T) the fraction of the stored value that a token replaces (delta rule only)


class Span(NamedTuple):
    """The inputs and outputs over a text or one span, or their gradients; the last dimension is contiguous.

    A kernel receives the features of queries and keys as q and k, unless it computes them itself (`maps_features`).
    """

    q: Tensor  # (B, H, T, F)
    k: Tensor  # (B, H, T, F)
    v: Tensor
    document_starts: Tensor | None
    log_decay: Tensor | None
    beta: Tensor | None
    y: Tensor  # (B, H, T, V)
    denominators: Tensor | None = None  # (B, H, T) (linear attention only)

    def part(self, begin: int, size: int) -> "Span":
        """Return the span of up to `size` tokens that starts at `begin`."""
        tokens = slice(begin, begin + size)
        return Span(*(None if x is None else x[:, tokens] if x.ndim == 2 else x[:, :, tokens] for x in self))  # type: ignore[arg-type]


class Before(NamedTuple):
    """The gradients of what a kernel has read."""

    state: Tensor
    q: Tensor  # of queries or their features
    k: Tensor


class Kernel(ABC):
    """The computation of one span of a recurrence; a state is (B, H, F, ...)."""

    name: ClassVar[str]
    """Its name in recipes."""

    normalizes: ClassVar[bool] = False
    """Whether outputs have denominators."""

    maps_features = False
    """Whether it computes the feature map itself."""

    token_dim: ClassVar[int] = 2
    """The dimension of arranged queries and keys by which tokens can be divided."""

    @classmethod
    def unavailable_reason(cls, attention: nn.Module, device: torch.device) -> str | None:
        """Return why the kernel cannot compute an attention on a device, or None."""
        return None

    def operation(self, features: FeatureMap, state: Tensor, x: ScanInputs) -> tuple[Tensor, Tensor] | None:
        """Return outputs and the state after a text of any length, computed as one operation that torch.compile can
        trace; None if the kernel computes it span by span."""
        return None

    def suited(self, features: FeatureMap, x: Span, state: Tensor, policy: DevicePolicy) -> "Kernel":
        """Return the kernel for a feature map and inputs: itself, or another kernel if it cannot compute them."""
        return self

    def token_bytes(self, x: Span, state: Tensor) -> int:
        """Return an estimate of the memory of temporary tensors for each token of a head, in bytes."""
        return state.shape[2] * (4 * x.q.element_size() + 8 * state.element_size())

    def arrange(self, x: Tensor) -> Tensor:
        """Return queries or keys in the layout of features that the kernel reads."""
        return x

    def restore(self, arranged: Tensor, out: Tensor) -> None:
        """Write queries or keys in that layout to `out` (B, H, T, ...)."""
        out.copy_(arranged)

    @abstractmethod
    def forward(self, x: Span, state: Tensor) -> Tensor:
        """Write the outputs of x, and return the state after the span."""

    @abstractmethod
    def backward(self, x: Span, dx: Span, state: Tensor, dstate: Tensor, dweights: list[Tensor]) -> "Before":
        """Write the gradients dx of the inputs, given dx.y and the gradient `dstate` of the state after the span.

        A kernel that maps features writes dx.q and dx.k too, and adds the gradients of the map's parameters to
        `dweights`.
        """


class Scan(torch.autograd.Function):
    """Returns outputs (B, H, T, V), the state after the last token, and the denominators (B, H, T) or None.

    `features` is the map of queries and keys; `trains`: whether gradients are recorded; `tensors` are the fields of
    ScanInputs and the parameters of the map.
    """

    @staticmethod
    def forward(
        ctx: Any, kernel: Kernel, features: FeatureMap, policy: DevicePolicy, trains: bool, state: Tensor, *tensors: Any
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        fields = len(ScanInputs._fields)
        (q, k, v, document_starts, *gates), weights = tensors[:fields], tensors[fields:]
        starts = None if document_starts is None else document_starts.bool()
        log_decay, beta = (None if gate is None else _in_rows(gate.to(state.dtype)) for gate in gates)
        x = Span(_in_rows(q), _in_rows(k), _in_rows(v), starts, log_decay, beta, _empty_like(v))
        kernel = kernel.suited(features, x, state, policy)
        size = span_tokens(v, policy, kernel.token_bytes(x, state))
        if kernel.normalizes:
            x = x._replace(denominators=state.new_empty(v.shape[:3]))
        states, after = [], state.contiguous()
        with without_autocast(state):
            for begin in range(0, q.shape[2], size):
                if trains:
                    states.append(after)
                span = x.part(begin, size)
                if not kernel.maps_features:
                    fq, fk = features.query(kernel.arrange(span.q)), features.key(kernel.arrange(span.k))
                    span = span._replace(q=_in_rows(fq), k=_in_rows(fk))
                after = kernel.forward(span, after)
        ctx.kernel, ctx.features, ctx.policy = kernel, features, policy
        ctx.size, ctx.weights = size, len(weights)
        _, _, _, _, _, *needs = ctx.needs_input_grad
        ctx.needs = ScanInputs(*needs[:fields])
        ctx.save_for_backward(*x, *weights, *states)
        if x.denominators is not None:
            ctx.mark_non_differentiable(x.denominators)
        return x.y, state.clone() if after is state else after, x.denominators

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dstate: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        kernel, features = ctx.kernel, ctx.features
        saved = ctx.saved_tensors  # once: activation checkpointing recomputes them
        fields = len(Span._fields)
        x, weights, states = Span(*saved[:fields]), saved[fields : fields + ctx.weights], saved[fields + ctx.weights :]
        dlog_decay, dbeta = (
            dstate.new_empty(gate.shape) if gate is not None and needed else None
            for gate, needed in ((x.log_decay, ctx.needs.log_decay), (x.beta, ctx.needs.beta))
        )
        dx = Span(_empty_like(x.q), _empty_like(x.k), _empty_like(x.v), None, dlog_decay, dbeta, _in_rows(dy))
        dstate, dweights = dstate.contiguous(), [torch.zeros_like(weight) for weight in weights]
        pairs = [(weight, total) for weight, total in zip(weights, dweights, strict=True) if weight.requires_grad]
        trained, totals = [weight for weight, _ in pairs], [total for _, total in pairs]
        with without_autocast(dstate):
            for number, state in reversed(list(enumerate(states))):
                span, dspan = (part.part(number * ctx.size, ctx.size) for part in (x, dx))
                if kernel.maps_features:
                    dstate = kernel.backward(span, dspan, state, dstate, dweights).state
                    continue
                queries = _Mapped(features.query, kernel, span.q, ctx.policy.span_bytes)
                keys = _Mapped(features.key, kernel, span.k, ctx.policy.span_bytes)
                mapped = span._replace(q=queries.features(), k=keys.features())
                dstate, *dfeatures = kernel.backward(mapped, dspan, state, dstate, dweights)
                del mapped
                of_queries = queries.backward(dfeatures.pop(0), dspan.q, trained)
                of_keys = keys.backward(dfeatures.pop(0), dspan.k, trained)
                for total, *grads in zip(totals, of_queries, of_keys, strict=True):
                    if (grad := _sum(grads)) is not None:
                        total += grad
        gradients = ScanInputs(dx.q, dx.k, dx.v, None, dlog_decay, dbeta)
        return None, None, None, None, dstate, *gradients, *dweights


class _Mapped:
    """The features of the queries or keys of a span, and the gradients of the feature map.

    On a CPU its graph is kept from the first to the second. On a GPU it may take more memory than all else, so it is
    computed anew for parts of the tokens.
    """

    NUMBERS = 6
    """An estimate of the numbers in a graph and its gradients, in at least float32, for each feature of a token."""

    def __init__(self, feature: Callable[[Tensor], Tensor], kernel: Kernel, x: Tensor, most_bytes: int | None):
        self.feature, self.kernel, self.x, self.most_bytes = feature, kernel, x, most_bytes
        self.graph = self._graph(kernel.arrange(x)) if most_bytes is None else None

    def features(self) -> Tensor:
        return _in_rows(self.graph[1].detach() if self.graph else self.feature(self.kernel.arrange(self.x)))

    def backward(self, dfeatures: Tensor, dx: Tensor, weights: Sequence[Tensor]) -> list[Tensor | None]:
        """Write the gradient of the queries or keys, and return those of weights."""
        if self.graph is not None:
            grads = [self._grads(self.graph, dfeatures, weights)]
        else:
            assert self.most_bytes is not None
            wide = torch.promote_types(dfeatures.dtype, torch.float32).itemsize
            graphs = self.NUMBERS * wide * dfeatures.numel()
            parts = 1 + 4 * graphs // (3 * self.most_bytes)  # a quarter is for the gradients of features
            xs, dys = (y.chunk(parts, self.kernel.token_dim) for y in (self.kernel.arrange(self.x), dfeatures))
            grads = [self._grads(self._graph(x), dy, weights) for x, dy in zip(xs, dys, strict=True)]
        dparts, *of_weights = zip(*grads, strict=True)
        self.kernel.restore(dparts[0] if len(dparts) == 1 else torch.cat(dparts, self.kernel.token_dim), dx)
        return [_sum(grads_of_parts) for grads_of_parts in of_weights]

    def _graph(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries or keys as the leaf of a graph, and their features."""
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            return leaf, self.feature(leaf)

    @staticmethod
    def _grads(graph: tuple[Tensor, Tensor], dfeatures: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        leaf, features = graph
        return torch.autograd.grad(features, (leaf, *weights), dfeatures, allow_unused=True)


def _sum(grads: Sequence[Tensor | None]) -> Tensor | None:
    """Return the sum of the gradients of a weight by those that use it."""
    used = [grad for grad in grads if grad is not None]
    return sum(used[1:], start=used[0]) if used else None


def _in_rows(x: Tensor) -> Tensor:
    """Return x with the numbers of a token contiguous; gates (B, H, T) have one."""
    return x if x.ndim < 4 or x.stride(-1) == 1 else x.contiguous()


def _empty_like(x: Tensor) -> Tensor:
    """Return an empty tensor in the layout of x with the numbers of a token contiguous. `torch.empty_like` may order
    the dimensions of an expanded tensor differently."""
    empty = torch.empty_like(x)
    return empty if empty.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function. Of it, autograd keeps only the arguments, and calls it again for the gradients."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def without_autocast(like: Tensor) -> torch.autocast:
    """Return a context that disables autocast, which would round float32 states to bfloat16."""
    return torch.autocast(like.device.type, enabled=False)
