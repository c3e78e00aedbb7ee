"""Speed of linear attention with a gate in onnxruntime, by the operators that may be it.

    python tools/compare_onnx_operators.py

`com.microsoft` is the operator of onnxruntime that exported models have; `standard` that of opset 27; `plain` the
matrix of all pairs of tokens, by operators that every runtime has. One row, 8 heads of 32, one thread; microseconds
of the processor, the median of many rounds in turn.
"""

import argparse
import statistics
import time
from typing import Any

import numpy as np
from onnx import ModelProto, helper

from lmlong.native.onnx.graph import Graph, Value

HEADS, FEATURES, VALUES = 8, 32, 33


def inputs(graph: Graph) -> tuple[Value, Value, Value, Value, Value]:
    """Queries, keys (B, T, H F), values (B, T, H V), log decay (B, T, H) and the state (B, H, F, V)."""
    sizes = {"q": HEADS * FEATURES, "k": HEADS * FEATURES, "v": HEADS * VALUES, "log_decay": HEADS}
    q, k, v, log_decay = (graph.input(name, np.float32, ["batch", "time", size]) for name, size in sizes.items())
    return q, k, v, log_decay, graph.state("S", np.float32, HEADS, FEATURES, VALUES)


def as_model(graph: Graph, y: Value, before: Value, after: Value) -> ModelProto:
    graph.set_state(before, after)
    graph.output("y", y, np.float32, ["batch", "time", HEADS * VALUES])
    return graph.model("lmlong", "")


def fused(domain: str) -> ModelProto:
    """One operator, of onnxruntime or of the standard."""
    graph = Graph()
    q, k, v, log_decay, before = inputs(graph)
    options = {"q_num_heads": HEADS, "kv_num_heads": HEADS, "update_rule": "gated", "scale": 1.0}
    y, after = graph.ops("LinearAttention", 2, q, k, v, before, log_decay, domain=domain, **options)
    made = as_model(graph, y, before, after)
    if not domain:
        made.opset_import[0].CopyFrom(helper.make_opsetid("", 27))
    return made


def plain() -> ModelProto:
    """All pairs of tokens, by products of matrices."""
    graph = Graph()
    flat_q, flat_k, flat_v, log_decay, before = inputs(graph)
    q, k = (x.reshape(0, 0, HEADS, FEATURES).transpose(0, 2, 1, 3) for x in (flat_q, flat_k))
    v = flat_v.reshape(0, 0, HEADS, VALUES).transpose(0, 2, 1, 3)
    total = graph.op("CumSum", log_decay.cast(np.float64), 1).transpose(0, 2, 1).unsqueeze(3)
    between = graph.op("Trilu", total - total.transpose(0, 1, 3, 2), upper=0)
    weights = graph.op("Trilu", graph.op("Exp", between).cast(np.float32), upper=0)
    left = graph.op("Exp", total).cast(np.float32)
    y = (q @ k.transpose(0, 1, 3, 2) * weights) @ v + (q * left) @ before
    kept, added = left.slice(2, -1), weights.slice(2, -1)
    after = before * kept + (k.transpose(0, 1, 3, 2) * added) @ v
    return as_model(graph, y.transpose(0, 2, 1, 3).reshape(0, 0, -1), before, after)


def feeds(time_: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    sizes = {"q": HEADS * FEATURES, "k": HEADS * FEATURES, "v": HEADS * VALUES, "log_decay": HEADS}
    found = {name: draw.random((1, time_, size), np.float32) for name, size in sizes.items()}
    found["log_decay"] *= -0.1
    return {**found, "past.S": draw.random((1, HEADS, FEATURES, VALUES), np.float32)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", nargs="+", type=int, default=[1, 64, 256, 1024], help="tokens of a call")
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = 1, 3
    models = {"com.microsoft": fused("com.microsoft"), "standard": fused(""), "plain": plain()}
    sessions = {
        name: onnxruntime.InferenceSession(model.SerializeToString(), settings) for name, model in models.items()
    }
    print(f"onnxruntime {onnxruntime.__version__}\n| tokens | {' | '.join(sessions)} |\n|---|{'---|' * len(sessions)}")
    for tokens in options.times:
        given = feeds(tokens)
        expected: Any = sessions["plain"].run(None, given)
        taken: dict[str, list[float]] = {name: [] for name in sessions}
        for _ in range(options.rounds):
            for name, session in sessions.items():
                begun = time.process_time()
                found = session.run(None, given)
                taken[name].append(time.process_time() - begun)
                assert all(np.allclose(x, y, rtol=1e-4) for x, y in zip(found, expected, strict=True)), name
        print(
            f"| {tokens:,} | {' | '.join(f'{1e6 * statistics.median(times):,.0f}' for times in taken.values())} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
