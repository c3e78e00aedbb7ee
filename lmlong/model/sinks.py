"""Sinks that begin as what a trained model attends to in their place: the first token of its text.

Softmax models put the attention that nothing else deserves on their first token, whose keys and values hardly depend on
which token it is (Xiao et al. 2024). A window loses that token, and with it most of what the model can do.
"""

from collections.abc import Container
from contextlib import ExitStack

import torch
from torch import Tensor

from lmlong.attention.inputs import GateProjection
from lmlong.attention.window.layer import SINK, WindowAttention
from lmlong.model.block import Mixer
from lmlong.model.language_model import LanguageModel
from lmlong.model.layers import RMSNorm
from lmlong.model.rope import apply_rope

FIRST_TOKENS = 256
"""Tokens of the vocabulary, evenly spaced, whose keys and values are averaged."""

CLOSED = -1e4
"""Logit of a sink that has no weight."""


@torch.no_grad()
def make_sinks(model: LanguageModel, new: Container[str]) -> None:
    """Set the sinks of windows whose weights are named in `new`; all other weights are trained.

    The value of a sink is that of a first token, and its logit is that of a first token just out of the window, as far
    as queries are linear in the token: a trained short convolution is left out, and a norm of queries becomes its mean
    factor.
    """
    windows = {
        window: mixer
        for name, mixer in model.named_modules()
        if isinstance(mixer, Mixer) and f"{name}.{SINK}.weight" in new
        for window in mixer.attention.parts
        if isinstance(window, WindowAttention)
    }
    if not windows:
        return
    gates: dict[WindowAttention, GateProjection] = {window: getattr(mixer, SINK) for window, mixer in windows.items()}
    for gate in gates.values():
        assert gate.bias is not None
        gate.bias.fill_(CLOSED)
    vocabulary, training = model.embedding.num_embeddings, model.training
    first = torch.arange(0, vocabulary, -(-vocabulary // FIRST_TOKENS))[None]  # each a document of its own
    seen: dict[WindowAttention, tuple[Tensor, Tensor]] = {}
    factors: dict[RMSNorm, Tensor] = {}

    def see_queries(norm: RMSNorm, arguments: tuple[Tensor, ...]) -> None:
        (queries,) = arguments
        factors[norm] = queries.square().mean(-1).rsqrt().mean((0, 1))  # of each head, or of all together

    def see(window: WindowAttention, arguments: tuple[Tensor, ...]) -> None:
        _, k, v = (x.mean(dim=(0, 2)) for x in arguments[:3])  # without rotation: these are at position 0
        seen[window] = k, v

    with ExitStack() as hooks:
        for window in windows:
            hooks.callback(window.register_forward_pre_hook(see).remove)  # type: ignore[arg-type]
        for norm in (mixer.query_norm for mixer in windows.values() if mixer.query_norm is not None):
            hooks.callback(norm.register_forward_pre_hook(see_queries).remove)  # type: ignore[arg-type]
        model.eval()(first, document_starts=torch.ones_like(first, dtype=torch.bool))
    model.train(training)
    for window, mixer in windows.items():
        key, value = seen[window]
        gate = gates[window]
        assert gate.bias is not None and window.sink_value is not None
        factor = None if mixer.query_norm is None else factors[mixer.query_norm]
        gate.weight.copy_(_logit_weights(mixer, window, key, factor))
        gate.bias.zero_()
        window.sink_value.copy_(value)


def _logit_weights(mixer: Mixer, window: WindowAttention, key: Tensor, factor: Tensor | None) -> Tensor:
    """Return the matrix (H, width) by which a token's vector gives the logits of the sink, for the keys (G, K) of a
    first token. `factor` is that of a norm of queries."""
    if mixer.rotates:
        back = torch.full((1, 1), -window.window)
        key = apply_rope(key[None, :, None], back, mixer.rope)[0, :, 0]
    (key,) = window.ungrouped(key[None])
    queries = mixer.in_proj.weight[: mixer.qkv_widths[0]].unflatten(0, (mixer.heads, -1))  # (H, K, width)
    if mixer.query_norm is not None and factor is not None:
        gain = mixer.query_norm.gain.view(-1, window.head_dim, 1)  # of each head, or of every head
        queries = queries * gain * factor.view(-1, 1, 1)
    return (key[0, :, None] @ queries)[:, 0] * window.head_dim**-0.5
