"""n-gram attention as an ONNX graph: the mean of the values that followed the last n tokens earlier in the document.

Each row of a table belongs to the n-gram that last wrote to it. A value is added to the row of the n tokens before it,
which is cleared first if it belongs to another n-gram. All tokens of a call are compared with each other, as in
lmlong/attention/ngram/naive.py. The state stores tokens and hashes plus one, so that 0 means none.

B batch, T time, H heads, V value dim, R rows.
"""

from typing import NamedTuple

import numpy as np

from lmlong.attention.ngram.hashing import BITS, GOLDEN, MULTIPLIER
from lmlong.native.onnx.graph import Value
from lmlong.native.onnx.layer import GraphReader, LayerInputs, Tokens
from lmlong.native.spec import NativeSpec

HALF = 1 << BITS // 2
MASK = (1 << BITS) - 1


class Rows(NamedTuple):
    """Sums (B, H, R, V), numbers (B, H, R) and n-grams (B, H, R) of all or some rows of a table."""

    S: Value
    number: Value
    ngram: Value

    def at(self, row: Value) -> "Rows":
        index = row.unsqueeze(3)
        return Rows(*(row.graph.op("GatherND", x, index, batch_dims=2) for x in self))

    def put(self, row: Value, new: "Rows") -> "Rows":
        """Return the table with rows replaced. A row that occurs twice must have the same contents each time."""
        wide = row.graph.op("Expand", row.unsqueeze(3), row.graph.op("Shape", new.S))
        parts = zip(self, (wide, row, row), new, strict=True)
        return Rows(*(row.graph.op("ScatterElements", x, index, y, axis=2) for x, index, y in parts))


class Written(NamedTuple):
    """The writes of a call, in order: values (B, H, T, V) to the rows of n-grams (B, H, T)."""

    v: Value
    ngram: Value
    row: Value
    time: Value  # (T,)

    def find(self, ngram: Value, row: Value, table: Rows, past: Value) -> tuple[Value, Value]:
        """Return the sum (B, H, T, V) and the number (B, H, T, 1) of the values of n-grams (B, H, T). `table` has their
        rows before the call; `past` (..., T, T) marks the writes to include."""
        graph = self.v.graph
        writes = past & (self.ngram > 0).unsqueeze(2)
        same = writes & ngram.unsqueeze(3).equal(self.ngram.unsqueeze(2))
        others = writes & row.unsqueeze(3).equal(self.row.unsqueeze(2)) & ~same
        cleared = others.where(self.time, -1).max()  # (B, H, T, 1) time of the last write of another n-gram to the row
        weights = (same & (self.time > cleared)).cast(np.float32)
        in_table = (table.ngram.unsqueeze(3).equal(ngram.unsqueeze(3)) & ~(cleared >= 0)).cast(np.float32)
        numbers = weights.sum() + in_table * table.number.unsqueeze(3)
        return graph.op("MatMul", weights, self.v) + in_table * table.S, numbers


def ngram_graph(reader: GraphReader, spec: NativeSpec, x: LayerInputs) -> Value:
    """Return the gated means of the values (B, T, H, V)."""
    graph, tokens, sizes, number_of_rows = x.graph, x.tokens, spec.options["sizes"], spec.options["rows"]
    v = x.v.reshape(0, 0, x.heads, x.value_dim)
    of_size = {size: hashes_of(tokens, size) for size in sorted(set(sizes))}
    hashes = graph.concat(*(of_size[size] for size in sizes), axis=1)  # (B, H, 1 + T)
    rows, time = rows_of(hashes, number_of_rows), tokens.range(tokens.time)
    table = Rows(
        graph.state(f"{x.name}.S", np.float32, len(sizes), number_of_rows, x.value_dim, in_place=True),
        graph.state(f"{x.name}.number", np.float32, len(sizes), number_of_rows, in_place=True),
        graph.state(f"{x.name}.ngram", np.int64, len(sizes), number_of_rows, in_place=True),
    )
    written = Written(v.transpose(0, 2, 1, 3), hashes.slice(2, 0, -1), rows.slice(2, 0, -1), time)
    # read everything before anything is written: a caller may reuse the table's memory for the table after the call
    before = table.at(rows)
    to_write, to_read = (Rows(*(x.slice(2, *part) for x in before)) for part in ((0, -1), (1,)))
    sums, numbers = written.find(hashes.slice(2, 1), rows.slice(2, 1), to_read, time <= time.unsqueeze(1))
    for old, new in zip(table, table.put(written.row, _after(written, to_write)), strict=True):
        graph.set_state(old, new)

    number_weight, raw_smoothing = (reader.weight(spec.weights[name]) for name in ("number_weight", "raw_smoothing"))
    seen = number_weight @ graph.op("Log", numbers.reshape(0, 0, -1) + 1.0)
    smoothed = numbers + graph.op("Exp", raw_smoothing).unsqueeze(1, 2)
    share = graph.op("Sigmoid", x.gates["read_gate"].transpose(0, 2, 1) + seen).unsqueeze(3) / smoothed
    return (sums * share).transpose(0, 2, 1, 3)


def _after(written: Written, before: Rows) -> Rows:
    """Return the written rows after the call, given their contents before. The last n-gram in a row owns it."""
    graph, row = written.v.graph, written.row
    writes = (written.ngram > 0).unsqueeze(2) & row.unsqueeze(3).equal(row.unsqueeze(2))
    last = writes.where(written.time, -1).max()  # (B, H, T, 1)
    ngram = (last.reshape(0, 0, -1) >= 0).where(graph.op("GatherND", written.ngram, last, batch_dims=2), before.ngram)
    S, number = written.find(ngram, row, before, graph.constant(np.array(True)))
    return Rows(S, number.reshape(0, 0, -1), ngram)


def hashes_of(tokens: Tokens, size: int) -> Value:
    """Return the hashes (B, 1, 1 + T) of the `size` tokens that end at the last token before the call and at each token
    of the call."""
    graph, past = tokens.graph, tokens.past
    oldest, *newer = (
        tokens.with_past.slice(1, past - size + i, *([i - size + 1] if i < size - 1 else [])) for i in range(size)
    )
    hashes = oldest
    for token in newer:
        hashes = graph.op("BitwiseAnd", hashes * MULTIPLIER + token, MASK)
    hashes = graph.op("BitwiseAnd", hashes * GOLDEN, MASK) + 1
    return (oldest > 0).where(hashes, 0).unsqueeze(1)


def rows_of(hashes: Value, rows: int) -> Value:
    """Return the row of each hash, from its higher bits; an arbitrary row for no hash."""
    return hashes.graph.op("Max", hashes - 1, 0) / HALF * rows / HALF
