"""Language models of lmlong for transformers: attention with a state of constant size for texts of any length.

This module needs only torch and transformers. A layer reads a text in chunks, or token by token as a recurrence. Its
state is in the linear-attention layers of transformers' cache, so generation, beam search and sampling work as for any
model. Rows may be padded on the left: padding counts as another document.

B batch, H heads, T time, C tokens of a chunk, K size of a head's queries and keys, V of its values, F features, R rows.
"""

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad, rms_norm, scaled_dot_product_attention, silu
from transformers import (
    DynamicCache,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

Gates = dict[str, Tensor]
"""Further inputs of an attention, projected from a token's vector, by name."""

CHUNK = 64
CHUNK_BY_CHANNEL = 16
"""Tokens read at once. With a decay for each feature, each pair of tokens needs a weight for each feature."""

CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""transformers' name of its cache, `past_key_values` before 5.20."""

NUMBER_OF_STATES = 8
"""Tensors that a layer may keep in the cache: one of its convolution, up to five of its attention, and in the first
layer the position and the last tokens."""
POSITION, LAST_TOKENS = 6, 7


class LmlongConfig(PreTrainedConfig):
    """The sizes and options of a model. `attention` lists the kind of each layer."""

    model_type = "lmlong"

    def __init__(
        self,
        vocab_size: int = 258,
        hidden_size: int = 64,
        intermediate_size: int = 192,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 4,
        head_dim: int = 16,
        value_dim: int = 16,
        attention: list[str] | None = None,
        feature_map: str = "elu",
        feature_options: dict[str, Any] | None = None,
        decay: str = "learned",
        longest_memory: int = 8192,
        window: int = 256,
        parallel_window: int | None = None,
        window_sink: bool = False,
        ngram: dict[str, Any] | None = None,
        ngram_embedding: dict[str, Any] | None = None,
        convolution: int = 4,
        rotary_layers: list[bool] | None = None,
        rotary_window: bool = True,
        rotary_base: float = 10_000.0,
        rotary_scaling: dict[str, float] | None = None,
        output_gate: bool = True,
        head_norm: bool = True,
        rms_norm_eps: float = 1e-6,
        embedding_scale: float = 1.0,
        use_cache: bool = True,
        **others: Any,
    ):
        self.vocab_size, self.hidden_size, self.intermediate_size = vocab_size, hidden_size, intermediate_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.num_key_value_heads, self.head_dim, self.value_dim = num_key_value_heads, head_dim, value_dim
        self.attention = attention or ["linear"] * num_hidden_layers
        self.feature_map, self.feature_options = feature_map, feature_options or {}
        self.decay, self.longest_memory = decay, longest_memory
        self.window, self.parallel_window, self.window_sink = window, parallel_window, window_sink
        self.ngram, self.ngram_embedding = ngram or {}, ngram_embedding
        self.convolution, self.output_gate, self.head_norm = convolution, output_gate, head_norm
        self.rotary_layers, self.rotary_window = rotary_layers or [False] * num_hidden_layers, rotary_window
        self.rotary_base, self.rotary_scaling = rotary_base, rotary_scaling
        self.rms_norm_eps, self.embedding_scale = rms_norm_eps, embedding_scale
        self.layer_types = ["hybrid" if kind == "softmax" else "linear_attention" for kind in self.attention]
        self.number_of_conv_states, self.use_cache = NUMBER_OF_STATES, use_cache
        super().__init__(**others)


class Tokens:
    """Positions of tokens in their documents, document starts and the padding mask."""

    def __init__(self, ids: Tensor, mask: Tensor | None, position: Tensor, last: Tensor | None):
        time = ids.shape[1]
        self.mask = mask  # (B, all tokens so far), whether softmax attention sees them
        self.starts: Tensor | None = None  # (B, T)
        if mask is not None and mask.shape[1] > 1:
            before = pad(mask[:, :-1], (1, 0))[:, -time:].bool()
            starts = mask[:, -time:].bool() & ~before
            starts[:, 0] &= mask.shape[1] > time  # the first token of a text has an empty state already
            self.starts = starts if starts.any() else None
        steps = torch.arange(time, device=ids.device)
        positions = position[:, None] + steps
        if self.starts is not None:
            last_start = torch.where(self.starts, steps, -1).cummax(1).values
            positions = torch.where(last_start >= 0, steps - last_start, positions)
        self.positions = positions  # (B, T)
        self.last: Tensor | None = None  # (B, T, P) the last tokens up to each token, -1 if of another document
        if last is not None:
            size = last.shape[1]
            windows = torch.cat([last, ids], dim=1).unfold(1, size + 1, 1)
            back = torch.arange(size, -1, -1, device=ids.device)
            self.last = windows.masked_fill(positions[:, :, None] < back, -1)

    @property
    def documents(self) -> Tensor | None:
        """The number of each token's document (B, T), 0 for the state's document. None if no document starts."""
        return None if self.starts is None else self.starts.cumsum(1)


NO_NGRAM, HASH_BITS = -1, 62
MULTIPLIER, GOLDEN = 0x27D4EB2F165667C5, 0x278DDE6E5FD29E01


def ngram_hash(ngrams: Tensor) -> Tensor:
    """Return the hash (B, T) of tokens (B, T, n). NO_NGRAM before the n-th token of a document."""
    mask = (1 << HASH_BITS) - 1
    hashes = torch.zeros_like(ngrams[..., 0])
    for tokens in ngrams.unbind(-1):
        hashes = (hashes * MULTIPLIER + tokens + 1) & mask
    return torch.where((ngrams >= 0).all(-1), hashes * GOLDEN & mask, NO_NGRAM)


def row_of(hashes: Tensor, rows: int) -> Tensor:
    """Return the row of a table for each hash; an arbitrary one for NO_NGRAM."""
    return ((hashes >> (HASH_BITS // 2)) * rows >> (HASH_BITS // 2)).clamp(min=0)


class LayerState:
    """The tensors of a layer in the cache, by number. None of them exist without a cache."""

    def __init__(self, cache: Any, layer: int):
        self.layer = None if cache is None else cache.layers[layer]

    def get(self, number: int) -> Tensor | None:
        return None if self.layer is None else self.layer.recurrent_states[number]

    def set(self, number: int, value: Tensor) -> None:
        if self.layer is not None:
            self.layer.device = value.device
            self.layer.has_previous_state[number] = True
            self.layer.update_recurrent_state(value, state_idx=number)


class RMSNorm(nn.Module):
    def __init__(self, *shape: int, eps: float):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], eps=self.eps) * self.weight


class ShortConvolution(nn.Module):
    """y_t = sum_j weight_j x_(t-j) over the last few tokens of the document, for each channel."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.width, self.weight = width, nn.Parameter(torch.empty(channels, width))

    def forward(self, x: Tensor, state: LayerState, tokens: Tokens) -> Tensor:
        past, tail = self.width - 1, state.get(0)
        tail = x.new_zeros(len(x), past, x.shape[2]) if tail is None else tail.to(x.dtype)
        x = torch.cat([tail, x], dim=1)
        y = torch.zeros_like(x[:, past:])
        for back in range(self.width):
            seen = x[:, past - back : x.shape[1] - back]
            y = y + (seen * (tokens.positions >= back)[..., None]) * self.weight[:, past - back]
        if past:
            distance = torch.arange(past - 1, -1, -1, device=x.device)  # of the last tokens to the last one
            state.set(0, x[:, -past:] * (tokens.positions[:, -1:] >= distance)[..., None])
        return y


class Gate(nn.Module):
    """A number for each token and head, or for each token and feature, projected from the token's vector in float32."""

    def __init__(self, width: int, shape: tuple[int, ...], activation: str, rank: int | None = None):
        super().__init__()
        self.shape, self.activation = shape, activation
        self.down = None if rank is None else nn.Parameter(torch.empty(rank, width))
        self.weight = nn.Parameter(torch.empty(math.prod(shape), rank or width))
        self.bias = nn.Parameter(torch.empty(math.prod(shape)))

    def forward(self, x: Tensor) -> Tensor:
        x = at_least_float32(x)
        if self.down is not None:
            x = x @ self.down.to(x.dtype).mT
        x = x @ self.weight.to(x.dtype).mT + self.bias.to(x.dtype)
        if self.activation == "sigmoid":
            x = x.sigmoid()
        elif self.activation == "log_sigmoid":
            x = logsigmoid(x).clamp(min=-20.0)
        return x.mT if len(self.shape) == 1 else x.unflatten(-1, self.shape).transpose(1, 2)


class FeatureMap(nn.Module):
    """Map queries and keys (B, H, T, K) to features (B, H, T, F), whose products replace softmax's exponential."""

    def __init__(self, config: LmlongConfig):
        super().__init__()
        heads, width, options = config.num_attention_heads, config.head_dim, config.feature_options
        self.kind, self.options = config.feature_map, options
        inner = options.get("width") or width
        self.inner = inner
        self.features = {
            "cosine": 1 + width,
            "hedgehog": 2 * width,
            "taylor": 1 + inner + inner * (inner + 1) // 2,
            "favor": options.get("features", 0),
        }.get(self.kind, width)
        projects = self.kind == "hedgehog" or (self.kind == "taylor" and options.get("width"))
        shape = (heads, width, width if self.kind == "hedgehog" else inner)
        self.query_projection, self.key_projection = (
            nn.Parameter(torch.empty(shape)) if projects else None for _ in range(2)
        )
        if self.kind == "favor":
            self.raw_gain = nn.Parameter(torch.empty(heads))
            rows = self.features // (2 if options["form"] == "hyperbolic" else 1)
            self.projection: Tensor
            self.register_buffer("projection", torch.empty(heads, rows, width))

    def query(self, q: Tensor) -> Tensor:
        if self.kind != "favor":
            return self._map(q, self.query_projection)
        exponent = self._random(self._of_one_length(q))
        return (exponent - exponent.amax(-1, keepdim=True)).exp().to(q.dtype)

    def key(self, k: Tensor) -> Tensor:
        if self.kind != "favor":
            return self._map(k, self.key_projection)
        k_long = self._of_one_length(k)
        length = self._gain(k_long) * k.shape[-1] ** 0.25
        longest = self.projection.to(k_long).norm(dim=-1).amax(-1)[:, None, None]
        shift = (length.square() - k_long.square().sum(-1, keepdim=True)) / 2 - (longest * length - 60.0).relu()
        return (self._random(k_long) + shift).exp().to(k.dtype)

    def _map(self, x: Tensor, projection: Tensor | None) -> Tensor:
        x = x if projection is None else x @ projection.to(x.dtype)
        if self.kind == "elu":
            wide = at_least_float32(x)
            return (wide.clamp(min=0) + wide.clamp(max=0).exp() + 1e-4).to(x.dtype)
        if self.kind == "relu":
            return torch.relu(x) + 1e-2
        if self.kind == "softmax":
            return x.softmax(-1) + 1e-4
        if self.kind == "hedgehog":
            return torch.cat([x, -x], dim=-1).softmax(-1) + 1e-4
        if self.kind == "cosine":
            wide = at_least_float32(x)
            direction = (0.99 * wide * (wide.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)
            return torch.cat([torch.ones_like(direction[..., :1]), direction], dim=-1)
        x = rms_norm(x, x.shape[-1:], eps=1e-6) * self.inner**-0.25  # taylor
        left, right = torch.triu_indices(self.inner, self.inner, offset=1, device=x.device)
        return torch.cat([torch.ones_like(x[..., :1]), x, x[..., left] * x[..., right], x * x * 0.5**0.5], dim=-1)

    def _of_one_length(self, x: Tensor) -> Tensor:
        x = at_least_float32(x)
        return rms_norm(x, x.shape[-1:], eps=1e-6) * (self._gain(x) * x.shape[-1] ** -0.25)

    def _gain(self, like: Tensor) -> Tensor:
        width = like.shape[-1]
        largest = min(2.0, 130.0 / (width**0.25 * (math.sqrt(width) + 4)))
        return (largest * self.raw_gain.to(like.dtype).sigmoid())[:, None, None]

    def _random(self, x: Tensor) -> Tensor:
        u = x @ self.projection.to(x.dtype).mT
        return torch.cat([u, -u], dim=-1) if self.options["form"] == "hyperbolic" else u


class Recurrence(nn.Module):
    """Base of linear attention and the delta rule: the decay of the state."""

    def __init__(self, config: LmlongConfig):
        super().__init__()
        self.heads, self.decay, self.longest = config.num_attention_heads, config.decay, config.longest_memory

    def log_decay(self, q: Tensor, gates: dict[str, Tensor]) -> Tensor | None:
        """Return the log decay (B, H, T), or (B, H, T, F) with a decay for each feature."""
        if self.decay != "fixed":
            return gates.get("log_decay")
        memory = torch.tensor([1024.0])
        if self.heads > 1:
            memory = torch.logspace(1, math.log2(self.longest), self.heads, base=2.0)
        return torch.log1p(-1 / memory).to(q.device)[None, :, None].expand(q.shape[:3])


class LinearAttention(Recurrence):
    """S_t = g_t S_(t-1) + fk_t v_t^T, z_t = g_t z_(t-1) + fk_t, y_t = fq_t S_t / fq_t . z_t."""

    def __init__(self, config: LmlongConfig):
        super().__init__(config)
        self.feature_map = FeatureMap(config)
        self.by_channel = config.decay == "channel"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, state: LayerState, tokens: Tokens, gates: Gates) -> Tensor:
        fq, fk = (at_least_float32(x) for x in (self.feature_map.query(q), self.feature_map.key(k)))
        v_wide, log_decay = v.to(fq.dtype), self.log_decay(q, gates)
        S, z = state.get(1), state.get(2)
        if S is None or z is None:
            shape = (*fk.shape[:2], fk.shape[-1])
            S, z = fk.new_zeros(*shape, v.shape[-1]), fk.new_zeros(shape)
        chunk, outputs = CHUNK_BY_CHANNEL if self.by_channel else CHUNK, []
        for begin in range(0, q.shape[2], chunk):
            piece = slice(begin, begin + chunk)
            left, weights = chunk_decays(fq, log_decay, tokens.starts, piece)
            y, S, z = self._chunk(fq[:, :, piece], fk[:, :, piece], v_wide[:, :, piece], S, z, left, weights)
            outputs.append(y)
        state.set(1, S)
        state.set(2, z)
        return torch.cat(outputs, dim=2).to(v.dtype)

    def _chunk(
        self, fq: Tensor, fk: Tensor, v: Tensor, S: Tensor, z: Tensor, left: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Read C tokens. `left` (B, H, C, 1 or F): the decay from the state before the chunk to each token. `weights`
        (B, H, C, C, 1 or F): the decay between each pair of tokens."""
        seen = (
            torch.einsum("bhtf,bhsf,bhtsf->bhts", fq, fk, weights) if self.by_channel else fq @ fk.mT * weights[..., 0]
        )
        numerator = seen @ v + (fq * left) @ S
        denominator = seen.sum(-1, keepdim=True) + ((fq * left) @ z[..., None])
        kept, added = left[:, :, -1], fk * weights[:, :, -1]
        S, z = S * kept[..., None] + added.mT @ v, z * kept + added.sum(2)
        return numerator / denominator.clamp_min(1e-30), S, z


class DeltaRule(Recurrence):
    """S_t = a_t (I - b_t k_t k_t^T) S_(t-1) + b_t k_t v_t^T, y_t = S_t^T q_t, with queries and keys of length one."""

    def __init__(self, config: LmlongConfig):
        super().__init__(config)
        self.inner = config.feature_options["delta"]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, state: LayerState, tokens: Tokens, gates: Gates) -> Tensor:
        fq, fk = (self._features(at_least_float32(x)) for x in (q, k))
        v_wide, log_decay, beta = v.to(fq.dtype), self.log_decay(q, gates), gates["beta"].to(fq.dtype)[..., None]
        S = state.get(1)
        S = fk.new_zeros(*fk.shape[:2], fk.shape[-1], v.shape[-1]) if S is None else S
        outputs = []
        for begin in range(0, q.shape[2], CHUNK):
            piece = slice(begin, begin + CHUNK)
            left, weights = chunk_decays(fq, log_decay, tokens.starts, piece)
            read = (x[:, :, piece] for x in (fq, fk, v_wide, beta))
            y, S = self._chunk(*read, S, left, weights[..., 0])  # type: ignore[call-arg]
            outputs.append(y)
        state.set(1, S)
        return torch.cat(outputs, dim=2).to(v.dtype)

    def _features(self, x: Tensor) -> Tensor:
        if self.inner == "silu":
            x = silu(x)
        elif self.inner == "relu":
            x = torch.relu(x) + 1e-2
        else:
            x = x.clamp(min=0) + x.clamp(max=0).exp() + 1e-4
        return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()

    @staticmethod
    def _chunk(
        fq: Tensor, fk: Tensor, v: Tensor, beta: Tensor, S: Tensor, left: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Read C tokens. The update u = b (v - S^T k) of each token depends on the updates of the tokens before it, so
        all of them are the solution of a triangular system."""
        stored = beta * (fk @ fk.mT * weights).tril(-1)
        identity = torch.eye(stored.shape[-1], dtype=stored.dtype, device=stored.device)
        u = torch.linalg.solve_triangular(identity + stored, beta * (v - (fk * left) @ S), upper=False)
        y = (fq @ fk.mT * weights) @ u + (fq * left) @ S
        return y, S * left[:, :, -1, :, None] + (fk * weights[:, :, -1, :, None]).mT @ u


def chunk_decays(like: Tensor, log_decay: Tensor | None, starts: Tensor | None, piece: slice) -> tuple[Tensor, Tensor]:
    """Return the decay from the state before a chunk to each of its tokens (B, H, C, 1 or F), and between each pair of
    tokens (B, H, C, C, 1 or F). It is 0 if a document starts in between."""
    time = like[:, :, piece].shape[2]
    gate = like.new_zeros(1, 1, time, 1)
    if log_decay is not None:
        gate = log_decay[:, :, piece]
        gate = gate if gate.ndim == 4 else gate[..., None]
    total = gate.double().cumsum(2)  # float64, since small differences of large sums matter
    past = torch.ones(time, time, dtype=torch.bool, device=like.device).tril()[None, None]
    kept = total
    if starts is not None and starts[:, piece].any():
        documents = starts[:, None, piece].cumsum(2)
        past = past & (documents[..., :, None] == documents[..., None, :])
        kept = total.masked_fill(documents[..., None] > 0, -torch.inf)
    between = (total[:, :, :, None] - total[:, :, None]).masked_fill(~past[..., None], -torch.inf)
    batch = len(like)
    left, weights = (x.exp().to(like.dtype) for x in (kept, between))
    return left.expand(batch, -1, -1, -1), weights.expand(batch, -1, -1, -1, -1)


class WindowAttention(nn.Module):
    """Softmax attention over the last tokens of the document, including the token itself, and to a learned value, the
    sink, if the model has one."""

    def __init__(self, config: LmlongConfig, window: int, value_heads: int):
        super().__init__()
        self.window = window
        self.sink_value = nn.Parameter(torch.zeros(value_heads, config.value_dim)) if config.window_sink else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, state: LayerState, tokens: Tokens, gates: Gates) -> Tensor:
        past, time = self.window - 1, q.shape[2]
        keys, values, current = state.get(3), state.get(4), state.get(5)
        if keys is None or values is None or current is None:
            keys, values = (x.new_zeros(*x.shape[:2], past, x.shape[3]) for x in (k, v))
            current = torch.zeros(len(k), past, dtype=torch.bool, device=k.device)
        keys, values = torch.cat([keys.to(k.dtype), k], dim=2), torch.cat([values.to(v.dtype), v], dim=2)
        new_document = tokens.documents
        new_document = (
            torch.zeros(len(q), time, dtype=torch.long, device=q.device) if new_document is None else new_document
        )
        document = torch.cat([current.long() - 1, new_document], dim=1)  # -1: no document, or an earlier one
        outputs = []
        for begin in range(0, time, self.window):  # a block of queries sees its own keys and the `past` keys before
            end = min(begin + self.window, time)
            keys_seen = slice(begin, end + past)
            query_time = torch.arange(begin + past, end + past, device=q.device)[:, None]
            key_time = torch.arange(begin, end + past, device=q.device)
            in_window = (key_time <= query_time) & (key_time > query_time - self.window)
            same_document = new_document[:, begin:end, None] == document[:, None, keys_seen]
            mask = (in_window & same_document)[:, None]
            blocks = q[:, :, begin:end], keys[:, :, keys_seen], values[:, :, keys_seen]
            sink = None if self.sink_value is None else gates["window_sink"][:, :, begin:end, None]
            outputs.append(self.attend(*blocks, mask, sink))
        if past:
            state.set(3, keys[:, :, time:])
            state.set(4, values[:, :, time:])
            state.set(5, document[:, time:] == document[:, -1:])
        return torch.cat(outputs, dim=2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sink: Tensor | None) -> Tensor:
        """Return the outputs, given the logits (B, H, T, 1) of the sink."""
        if sink is None or self.sink_value is None:
            return scaled_dot_product_attention(q, k, v, mask)
        logits = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
        weights = torch.cat([logits, sink.to(logits.dtype)], dim=3).softmax(3)
        value = self.sink_value.repeat_interleave(q.shape[1] // len(self.sink_value), dim=0)
        return weights[..., :-1] @ v + weights[..., -1:] * value[:, None].to(v.dtype)


class SoftmaxAttention(nn.Module):
    """Softmax attention over the whole document. Its keys and values, in the cache's own layer, grow with the text."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, state: LayerState, tokens: Tokens, gates: Gates) -> Tensor:
        if state.layer is not None:
            k, v = state.layer.update(k, v)
        time, total = q.shape[2], k.shape[2]
        mask = torch.ones(time, total, dtype=torch.bool, device=q.device).tril(total - time)[None, None]
        if tokens.mask is not None:
            itself = mask & ~mask.tril(total - time - 1)  # padding sees itself, so that its softmax is defined
            mask = (mask & tokens.mask[:, None, None, :].bool()) | itself
        return scaled_dot_product_attention(q, k, v, mask)


class ParallelWindow(nn.Module):
    """y = g window + (1 - g) recurrence, with a gate g for each token and head."""

    def __init__(self, config: LmlongConfig, recurrence: nn.Module):
        super().__init__()
        self.recurrence = recurrence
        self.window = WindowAttention(config, config.parallel_window or 1, config.num_attention_heads)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, state: LayerState, tokens: Tokens, gates: Gates) -> Tensor:
        recurrence = self.recurrence(q, k, v, state, tokens, gates)
        window = self.window(gates["rotated_q"], gates["rotated_k"], v, state, tokens, gates)
        share = gates["window_share"].to(v.dtype)[..., None]
        return share * window + (1 - share) * recurrence


class NgramAttention(nn.Module):
    """The mean of the values that followed the last n tokens at their earlier occurrences in the document. A table has
    R rows; each belongs to the n-gram that was last written to it."""

    def __init__(self, config: LmlongConfig):
        super().__init__()
        heads, sizes = config.num_attention_heads, config.ngram["sizes"]
        self.sizes, self.rows = [sizes[head % len(sizes)] for head in range(heads)], config.ngram["buckets"]
        self.number_weight = nn.Parameter(torch.empty(heads, heads))
        self.raw_smoothing = nn.Parameter(torch.empty(heads))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, state: LayerState, tokens: Tokens, gates: Gates) -> Tensor:
        values, shape = at_least_float32(v), (len(v), len(self.sizes), self.rows)
        table, number, ngram = state.get(1), state.get(2), state.get(3)
        if table is None or number is None or ngram is None:
            table, number = values.new_zeros(*shape, v.shape[-1]), values.new_zeros(shape)
            ngram = torch.full(shape, NO_NGRAM, device=v.device)
        assert tokens.last is not None
        written, read = (
            torch.stack([ngram_hash(tokens.last[..., -n - late : tokens.last.shape[-1] - late]) for n in self.sizes], 1)
            for late in (1, 0)
        )
        document = torch.zeros_like(tokens.positions) if tokens.documents is None else tokens.documents
        document = document[:, None].expand_as(written)
        rows = TableRows((table, number, ngram), values, written, row_of(written, self.rows), document)
        time = torch.arange(v.shape[2], device=v.device).expand_as(read)
        sums, counts, hashes = rows.at(row_of(read, self.rows), time, document)
        is_match = (hashes == read) & (read != NO_NGRAM)
        sums, counts = sums * is_match[..., None], counts * is_match
        for index, tensor in enumerate(rows.after(), start=1):
            state.set(index, tensor)
        evidence = torch.einsum("hj,bjt->bht", self.number_weight.to(sums.dtype), counts.log1p())
        smoothed = counts + self.raw_smoothing.to(sums.dtype).exp()[:, None]
        weight = (gates["read_gate"].to(sums.dtype) + evidence).sigmoid() / smoothed
        return (sums * weight[..., None]).to(v.dtype)


class TableRows:
    """The rows of a table (B, H, R, V) while values (B, H, T, V) are written to it, computed for all times at once. The
    writes are sorted by row and time. A sum accumulates until another n-gram or document writes to its row."""

    def __init__(
        self, before: tuple[Tensor, Tensor, Tensor], values: Tensor, written: Tensor, row: Tensor, document: Tensor
    ):
        self.before, self.document = before, document  # the table, the numbers and the n-grams
        table, number, _ = before
        self.row = row  # (B, H, T)
        count = row.shape[2]
        counts = written != NO_NGRAM
        self.time = torch.arange(count, device=row.device).expand_as(row)
        # tokens that write nothing are sorted after all rows
        self.key, order = (torch.where(counts, row, table.shape[2]) * count + self.time).sort(-1)
        self.sorted_row = self.key // count
        self.hash, self.of_document = written.gather(2, order), document.gather(2, order)
        new_row = self.sorted_row != pad(self.sorted_row, (1, 0), value=-1)[..., :-1]
        same = (self.hash == pad(self.hash, (1, 0))[..., :-1]) & (
            self.of_document == pad(self.of_document, (1, 0))[..., :-1]
        )
        begin = torch.where(new_row | ~same, self.time, 0).cummax(-1).values  # start of each write's sum
        sums = pad(values.gather(2, self._wide(order, values)).double().cumsum(2), (0, 0, 1, 0))
        self.sum = (sums[:, :, 1:] - sums.gather(2, self._wide(begin, sums))).to(values.dtype)
        self.number = (self.time - begin + 1).to(number.dtype)
        stored, many, hashes = self._before(self.sorted_row.clamp(max=table.shape[2] - 1))
        continues = new_row.gather(2, begin) & (hashes == self.hash) & (self.of_document == 0)
        self.sum = self.sum + stored * continues[..., None]
        self.number = self.number + many * continues

    def at(self, row: Tensor, time: Tensor, document: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sums, numbers and n-grams of rows (B, H, T) after the writes up to `time`, for readers in
        `document`."""
        count = self.key.shape[2]
        write = torch.searchsorted(self.key, row * count + time, right=True) - 1
        write, is_written = write.clamp(min=0), write >= 0
        is_written = is_written & (self.sorted_row.gather(2, write) == row)
        stored, many, hashes = self._before(row)
        hashes = torch.where(
            is_written,
            self.hash.gather(2, write).masked_fill(self.of_document.gather(2, write) != document, NO_NGRAM),
            hashes.masked_fill(document > 0, NO_NGRAM),
        )
        sums = torch.where(is_written[..., None], self.sum.gather(2, self._wide(write, self.sum)), stored)
        return sums, torch.where(is_written, self.number.gather(2, write), many), hashes

    def after(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the table, the numbers and the n-grams after all writes."""
        table, number, ngram = self.before
        last = self.document[..., -1:]
        sums, many, hashes = self.at(self.row, torch.full_like(self.time, self.time.shape[2] - 1), last)
        return (
            table.scatter(2, self._wide(self.row, table), sums.to(table.dtype)),
            number.scatter(2, self.row, many),
            ngram.masked_fill(last > 0, NO_NGRAM).scatter(2, self.row, hashes),
        )

    def _before(self, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        table, number, ngram = self.before
        return table.gather(2, self._wide(row, table)), number.gather(2, row), ngram.gather(2, row)

    @staticmethod
    def _wide(row: Tensor, like: Tensor) -> Tensor:
        return row[..., None].expand(*row.shape, like.shape[-1])


class NgramEmbedding(nn.Module):
    """The sum of projected vectors of the last n tokens, one for each n."""

    def __init__(self, width: int, orders: list[int], rows: int, row_width: int):
        super().__init__()
        self.orders, self.rows = orders, rows
        self.table = nn.Parameter(torch.empty(len(orders) * rows, row_width))
        self.projection = nn.Linear(len(orders) * row_width, width, bias=False)

    def forward(self, tokens: Tokens) -> Tensor:
        assert tokens.last is not None
        found = []
        for number, n in enumerate(self.orders):
            hashes = ngram_hash(tokens.last[..., -n:])
            vectors = self.table[row_of(hashes, self.rows) + number * self.rows]
            found.append(vectors.masked_fill((hashes == NO_NGRAM)[..., None], 0))
        return self.projection(torch.cat(found, dim=-1))


class Mixer(nn.Module):
    """Queries, keys and values, a short convolution over them, the attention, a norm of each head and a gate."""

    def __init__(self, config: LmlongConfig, layer: int):
        super().__init__()
        self.kind, width, self.heads = config.attention[layer], config.hidden_size, config.num_attention_heads
        has_keys = self.kind != "ngram"
        self.kv_heads = config.num_key_value_heads if has_keys else self.heads
        self.values = self.heads * config.value_dim
        keys = [self.heads * config.head_dim, self.kv_heads * config.head_dim] if has_keys else [0, 0]
        self.widths = [*keys, self.kv_heads * config.value_dim]
        self.gate_width = self.values if config.output_gate else 0
        self.norm = RMSNorm(width, eps=config.rms_norm_eps)
        self.in_proj = nn.Linear(width, sum(self.widths) + self.gate_width, bias=False)
        self.convolution = ShortConvolution(sum(self.widths), config.convolution) if config.convolution else None
        self.rotary, self.rotary_window = config.rotary_layers[layer], config.rotary_window
        self.rope = (config.rotary_base, config.rotary_scaling)
        self._make_attention(config)
        normed = config.head_norm and has_keys
        self.head_norm = RMSNorm(self.heads, config.value_dim, eps=config.rms_norm_eps) if normed else None
        self.out_proj = nn.Linear(self.values, width, bias=False)

    def _make_attention(self, config: LmlongConfig) -> None:
        width, heads = config.hidden_size, (self.heads,)
        self.gates: dict[str, str] = {}  # name of each gate, and the attribute of its module
        self.parallel = self.kind in ("linear", "delta") and config.parallel_window is not None
        attention: nn.Module
        if self.kind in ("linear", "delta"):
            attention = LinearAttention(config) if self.kind == "linear" else DeltaRule(config)
            if config.decay == "channel":
                features = FeatureMap(config).features
                self.forget_gate = Gate(width, (self.heads, features), "log_sigmoid", rank=16)
            elif config.decay == "learned":
                self.forget_gate = Gate(width, heads, "log_sigmoid")
            if config.decay in ("channel", "learned"):
                self.gates["log_decay"] = "forget_gate"
            if self.kind == "delta":
                self.gates["beta"], self.beta = "beta", Gate(width, heads, "sigmoid")
            if self.parallel:
                attention = ParallelWindow(config, attention)
                self.gates["window_share"], self.window_share = "window_share", Gate(width, heads, "sigmoid")
        elif self.kind == "ngram":
            attention = NgramAttention(config)
            self.gates["read_gate"], self.read_gate = "read_gate", Gate(width, heads, "identity")
        elif self.kind in ("window", "softmax"):
            windowed = self.kind == "window"
            attention = WindowAttention(config, config.window, self.kv_heads) if windowed else SoftmaxAttention()
        else:
            raise ValueError(f"{self.kind!r}: this module does not have this kind of attention")
        if config.window_sink and (self.parallel or self.kind == "window"):
            self.gates["window_sink"], self.window_sink = "window_sink", Gate(width, heads, "identity")
        self.attention = attention

    def forward(self, x: Tensor, state: LayerState, tokens: Tokens) -> Tensor:
        x = self.norm(x)
        qkv, gate = self.in_proj(x).split([sum(self.widths), self.gate_width], dim=-1)
        if self.convolution is not None:
            qkv = self.convolution(qkv, state, tokens)
        parts = zip(qkv.split(self.widths, dim=-1), (self.heads, self.kv_heads, self.kv_heads), strict=True)
        q, k, v = (part.unflatten(-1, (heads, part.shape[-1] // heads)).transpose(1, 2) for part, heads in parts)
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, dim=1) for part in (k, v))
        gates = {name: getattr(self, module)(x) for name, module in self.gates.items()}
        if self.parallel:
            rotated = (rotate(part, tokens.positions, *self.rope) if self.rotary_window else part for part in (q, k))
            gates["rotated_q"], gates["rotated_k"] = rotated
        if self.rotary:
            q, k = (rotate(part, tokens.positions, *self.rope) for part in (q, k))
        y = self.attention(q, k, v, state, tokens, gates).transpose(1, 2)
        y = y if self.head_norm is None else self.head_norm(y)
        y = y.flatten(2) * silu(gate) if self.gate_width else y.flatten(2)
        return self.out_proj(y)


class SwiGLU(nn.Module):
    def __init__(self, config: LmlongConfig):
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.in_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.out_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.in_proj(self.norm(x)).chunk(2, dim=-1)
        return self.out_proj(silu(gate) * value)


class Block(nn.Module):
    def __init__(self, config: LmlongConfig, layer: int):
        super().__init__()
        self.mixer, self.mlp = Mixer(config, layer), SwiGLU(config)

    def forward(self, x: Tensor, state: LayerState, tokens: Tokens) -> Tensor:
        x = x + self.mixer(x, state, tokens)
        return x + self.mlp(x)


class LmlongPreTrainedModel(PreTrainedModel):
    config_class = LmlongConfig
    base_model_prefix = "model"
    _is_stateful = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _supports_sdpa = True

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: all weights come from a file, since lmlong trains the model."""


class LmlongModel(LmlongPreTrainedModel):
    """The model from tokens to the hidden states before the output matrix."""

    def __init__(self, config: LmlongConfig):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        tables, orders = config.ngram_embedding, []
        self.ngram_embedding: NgramEmbedding | None = None
        if tables is not None:
            orders = tables["orders"]
            self.ngram_embedding = NgramEmbedding(config.hidden_size, orders, tables["rows"], tables["width"])
        sizes = config.ngram["sizes"] if "ngram" in config.attention else []
        self.last_tokens = max([*sizes, *orders], default=0)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, cache: Any = None) -> Tensor:
        first = LayerState(cache, 0)
        position, last = first.get(POSITION), first.get(LAST_TOKENS)
        position = input_ids.new_zeros(len(input_ids)) if position is None else position
        if self.last_tokens and last is None:
            last = input_ids.new_full((len(input_ids), self.last_tokens), -1)
        tokens = Tokens(input_ids, attention_mask, position, last)
        x = self.embedding(input_ids) * self.config.embedding_scale
        if self.ngram_embedding is not None:
            x = x + self.ngram_embedding(tokens)
        for layer, block in enumerate(self.blocks):
            x = block(x, LayerState(cache, layer), tokens)
        first.set(POSITION, tokens.positions[:, -1] + 1)
        if last is not None:
            first.set(LAST_TOKENS, torch.cat([last, input_ids], dim=1)[:, -self.last_tokens :])
        return self.norm(x)


class LoopPenalty(LogitsProcessor):
    """Penalize tokens that would write a third copy of a unit with which the generated text ends twice in a row, or the
    same four tokens for the ninth time. Does not penalize other repeats, or repeats of the prompt."""

    def __init__(self, penalty: float):
        self.penalty = penalty
        self.prompt: int | None = None  # number of tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.prompt = input_ids.shape[1] if self.prompt is None else self.prompt
        scores = scores.clone()
        for row, text in enumerate(input_ids[:, self.prompt :].tolist()):
            for token, factor in loops(text).items():
                scores[row, token] -= min(self.penalty * factor, 1e4)
        return scores


def loops(text: list[int]) -> dict[int, float]:
    """Return the tokens that would continue a loop or a near-loop, and the factor of the penalty of each."""
    same_before = [end for end in range(max(3, len(text) - 256), len(text)) if text[end - 3 : end] == text[-3:]]
    followed = Counter(text[end] for end in same_before)
    factors = {token: count - 7.0 for token, count in followed.items() if count >= 8}
    for shift in range(1, min(len(text) // 2, 1024) + 1):
        needed, same = max(shift, 2), 0
        while same + shift < len(text) and text[-1 - same] == text[-1 - same - shift]:
            same += 1
        if same >= needed:
            factors[text[-shift]] = max(3.0 ** min(same - needed, 20), factors.get(text[-shift], 0.0))
    return factors


class LmlongForCausalLM(LmlongPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: LmlongConfig):
        super().__init__(config)
        self.model = LmlongModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        cache = past_key_values if cache is None else cache
        if cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache(config=self.config)
        hidden = self.model(input_ids, attention_mask, cache)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = at_least_float32(self.lm_head(hidden[:, kept]))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: Any = None,
        logits_processor: Any = None,
        loop_penalty: float | None = None,
        **options: Any,
    ) -> Any:
        """Generate like any model of transformers. If tokens are sampled, `loop_penalty` applies, by default the
        generation config's; 0 turns it off."""
        chosen = {"do_sample": options.get("do_sample"), "loop_penalty": loop_penalty}
        for config in (generation_config, self.generation_config):
            chosen = {name: getattr(config, name, None) if one is None else one for name, one in chosen.items()}
        processors = list(logits_processor or [])
        if chosen["do_sample"] and chosen["loop_penalty"]:
            processors.append(LoopPenalty(chosen["loop_penalty"]))
        return super().generate(inputs, generation_config, LogitsProcessorList(processors), **options)


def rotate(x: Tensor, positions: Tensor, base: float, scaling: dict[str, float] | None) -> Tensor:
    """Rotate pairs of the first and second half of x (B, H, T, K) by the angles of positions (B, T)."""
    half = x.shape[-1] // 2
    exponents = -torch.arange(half, device=x.device, dtype=torch.float64) / half
    frequencies = base**exponents
    if scaling is not None:  # as in Llama 3
        turns = scaling["original_length"] * frequencies / (2 * math.pi)
        low, high = scaling["low_frequency_factor"], scaling["high_frequency_factor"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (kept + (1 - kept) / scaling["factor"])
    angles = positions[:, None, :, None].double() * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
