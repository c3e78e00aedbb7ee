"""A causal model as one graph from tokens and a state to logits and the next state.

A call may have any number of rows and tokens, so the same graph reads a text in chunks and generates token by token.

B batch, T time, H heads, D head dim.
"""

from typing import NamedTuple

import numpy as np
from onnx import ModelProto
from torch import Tensor

from lmlong import __version__
from lmlong.attention.inputs import MIN_LOG_DECAY
from lmlong.attention.ngram.onnx import hashes_of, rows_of
from lmlong.errors import UsageError
from lmlong.model.language_model import LanguageModel
from lmlong.native.onnx.graph import BATCH, FUSED, TIME, Graph, State, Value
from lmlong.native.onnx.layer import GraphReader, LayerInputs, Tokens, array
from lmlong.native.spec import NativeSpec, NoNativeForm


class OnnxModel(NamedTuple):
    graph: ModelProto
    states: list[State]


def onnx_model(model: LanguageModel) -> OnnxModel:
    """Return the graph of a model, with its weights in float32."""
    try:
        return _language_model(GraphReader(Graph(), model), model)
    except NoNativeForm as error:
        raise UsageError(f"model: {error}, so it cannot be exported to ONNX. Use `--to hf`.") from None


def _language_model(reader: GraphReader, model: LanguageModel) -> OnnxModel:
    graph, spec = reader.graph, reader.open(model)
    if spec.parts["hourglass"] is not None or spec.options["downsampled_layers"]:
        raise UsageError("model.downsample: an hourglass is not exported. Use a model whose layers read every token.")
    tables = spec.parts["ngram_embedding"]
    orders = [] if tables is None else reader.open(tables).options["orders"]
    tokens = Tokens(graph, max([spec.options["past_tokens"] or 0, *orders]))  # `hashes_of` needs n of them
    embedding = reader.weight(reader.open(spec.parts["embedding"]).weights["weight"])
    x = graph.op("Gather", embedding, tokens.ids) * float(spec.options["embedding_scale"])
    if tables is not None:
        x = x + _ngram_embedding(reader, tables, tokens)
    blocks = spec.parts["blocks"]
    assert isinstance(blocks, tuple)
    for number, block in enumerate(blocks):
        parts = reader.open(block).parts
        with graph.scope(f"blocks.{number}"):
            x = x + _mixer(reader, parts["mixer"], x, tokens, str(number))
            if parts["ngram"] is not None:
                with graph.scope("ngram"):
                    x = x + _mixer(reader, parts["ngram"], x, tokens, f"{number}.added")
            x = x + _swiglu(reader, parts["mlp"], x)
    x = _rms_norm(reader, spec.parts["norm"], x)
    output = reader.open(reader.open(spec.parts["lm_head"]).parts["matrix"]).weights["weight"]
    assert output is not None
    vocabulary, width = output.shape
    logits = graph.op("Gemm", x.reshape(-1, width), reader.weight(output), transB=1)  # the embedding's, if it is tied
    shape = graph.concat(graph.op("Shape", tokens.ids), np.array([vocabulary]), axis=0)
    graph.output("logits", graph.op("Reshape", logits, shape), np.float32, [BATCH, TIME, vocabulary])
    reader.check_all_read()
    return OnnxModel(graph.model("lmlong", __version__), graph.states)


def _ngram_embedding(reader: GraphReader, module: object, tokens: Tokens) -> Value:
    """Return the sum (B, T, width) of the projected vectors of the last n tokens."""
    spec, graph = reader.open(module, "ngram_embedding"), tokens.graph
    table, rows, found = reader.weight(spec.weights["table"]), spec.options["rows"], []
    for number, n in enumerate(spec.options["orders"]):
        hashes = graph.op("Squeeze", hashes_of(tokens, n).slice(2, 1), 1)  # (B, T), 0 before the document's n-th token
        vectors = graph.op("Gather", table, rows_of(hashes, rows) + number * rows)
        found.append((hashes > 0).unsqueeze(2).where(vectors, 0.0))
    return _matmul(reader, spec.parts["projection"], graph.concat(*found, axis=2))


def _mixer(reader: GraphReader, module: object, x: Value, tokens: Tokens, layer: str) -> Value:
    """Return the output of a layer's attention, which is added to x (B, T, width)."""
    spec = reader.open(module)
    sizes = [spec.options[name] for name in ("heads", "kv_heads", "head_dim", "value_dim")]
    heads, kv_heads, head_dim, value_dim = sizes
    has_keys = spec.options["has_keys"]
    widths = [heads * head_dim, kv_heads * head_dim] if has_keys else []
    x = _rms_norm(reader, spec.parts["norm"], x)
    qkv, *gate = _matmul(reader, spec.parts["in_proj"], x).split(
        sum(widths) + kv_heads * value_dim, *([heads * value_dim] if spec.options["gated"] else [])
    )
    qkv = _short_conv(reader, spec.parts["convolution"], qkv, layer)
    *qk, v = qkv.split(*([sum(widths)] if has_keys else []), kv_heads * value_dim)  # qk: [] or queries beside keys
    rotated = qk
    if spec.options["frequencies"] is not None:
        rotated = [_rotate(x, spec.options["frequencies"], heads + kv_heads, tokens) for x in qk]
    gates = _gates(reader, spec, x)
    q_and_k, rotated_q_and_k = (
        [part for x in inputs for part in x.split(*widths)]
        for inputs in (rotated if spec.options["uses_rope"] else qk, rotated)
    )
    inputs = LayerInputs(layer, tokens, q_and_k, rotated_q_and_k, v, gates, *sizes)
    y = reader.build(spec.parts["attention"], inputs)
    if spec.parts["head_norm"] is not None:
        y = _head_norm(reader, spec.parts["head_norm"], y)
    y = y.reshape(0, 0, -1)
    if gate:
        y = y * _silu(gate[0])
    return _matmul(reader, spec.parts["out_proj"], y)


def _swiglu(reader: GraphReader, module: object, x: Value) -> Value:
    spec = reader.open(module)
    x = _matmul(reader, spec.parts["in_proj"], _rms_norm(reader, spec.parts["norm"], x))
    gate, value = x.graph.ops("Split", 2, x, axis=-1, num_outputs=2)
    return _matmul(reader, spec.parts["out_proj"], _silu(gate) * value)


def _matmul(reader: GraphReader, module: object, x: Value) -> Value:
    return x @ reader.weight(reader.open(module).weights["weight"], transposed=True)


def _rms_norm(reader: GraphReader, module: object, x: Value) -> Value:
    spec = reader.open(module)
    gain = reader.weight(spec.weights["weight"])
    return x.graph.op("RMSNormalization", x, gain, axis=-1, epsilon=spec.options["epsilon"])


def _head_norm(reader: GraphReader, module: object, x: Value) -> Value:
    """Return x (B, T, H, V) normalized per head, with gains (H, V)."""
    spec = reader.open(module)
    gain = spec.weights["weight"]
    assert gain is not None
    ones = np.ones(gain.shape[1], np.float32)
    normed = x.graph.op("RMSNormalization", x, ones, axis=-1, epsilon=spec.options["epsilon"])
    return normed * reader.weight(gain)


def _short_conv(reader: GraphReader, module: object, x: Value, layer: str) -> Value:
    """Return y_t = sum_j weight_j x_(t-j) for each channel of x (B, T, channels)."""
    if module is None:
        return x
    spec = reader.open(module)
    weight, width = spec.weights["weight"], spec.options["width"]
    assert weight is not None
    if width == 1:
        return x * array(weight[:, 0])
    graph, kernel = x.graph, reader.weight(weight).unsqueeze(1)
    before = graph.state(f"{layer}.conv", np.float32, len(weight), width - 1)
    y, after = graph.ops("CausalConvWithState", 2, x.transpose(0, 2, 1), kernel, None, before, domain=FUSED)
    graph.set_state(before, after)
    return y.transpose(0, 2, 1)


def _gates(reader: GraphReader, spec: NativeSpec, x: Value) -> dict[str, Value]:
    """Return the attention's gates by name, (B, T, H) or (B, T, H F)."""
    names, gates = spec.options["gates"], spec.parts["gates"]
    assert isinstance(gates, list)
    return {name: _gate(reader, gate, x) for name, gate in zip(names, gates, strict=True)}


def _gate(reader: GraphReader, module: object, x: Value) -> Value:
    spec, op = reader.open(module), x.graph.op
    if spec.weights["down"] is not None:
        x = x @ reader.weight(spec.weights["down"], transposed=True)
    x = x @ reader.weight(spec.weights["weight"], transposed=True) + reader.weight(spec.weights["bias"])
    activation = spec.options["activation"]
    if activation == "sigmoid":
        return op("Sigmoid", x)
    if activation == "log_sigmoid":
        return op("Max", -op("Softplus", -x), MIN_LOG_DECAY)
    assert activation == "identity"
    return x


def _rotate(x: Value, frequencies: Tensor, heads: int, tokens: Tokens) -> Value:
    """Rotate x (B, T, H D), pairs of the first and second half of each head."""
    return x.graph.op("RotaryEmbedding", x, *tokens.cos_sin(frequencies), num_heads=heads)


def _silu(x: Value) -> Value:
    return x * x.graph.op("Sigmoid", x)
