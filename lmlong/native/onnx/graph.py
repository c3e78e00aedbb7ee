"""An ONNX graph, written as formulas of its tensors. Only `Graph.model` needs the package `onnx`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import numpy as np

OPSET = 23
"""The version of the standard operators: the first that has RMS norms, rotary positions and attention."""

IR_VERSION = 11
FUSED = "com.microsoft"
"""Domain of onnxruntime's operators: linear attention and convolutions with a state, on a CPU. Version 1.26 has them,
1.24 does not."""

BATCH, TIME, PAST = "batch", "time", "past"
"""Dimensions of any size."""

END = int(np.iinfo(np.int64).max)
"""End of a slice up to the last element."""


class State(NamedTuple):
    """A tensor that a call reads as `input` and returns as `output`. A document begins with zeros of `shape` for each
    row. If it is computed in place, the output may share the input's memory."""

    input: str
    output: str
    shape: tuple[int, ...]
    dtype: str
    in_place: bool


def _operator(kind: str) -> Callable[["Value", "Operand"], "Value"]:
    """Return a method that adds a node with two inputs."""
    return lambda left, right: left.graph.op(kind, left, right)


class Value:
    """A tensor of a graph. Each operation on it adds a node."""

    def __init__(self, graph: "Graph", name: str):
        self.graph, self.name = graph, name

    __add__ = _operator("Add")
    __sub__ = _operator("Sub")
    __mul__ = _operator("Mul")
    __truediv__ = _operator("Div")
    __matmul__ = _operator("MatMul")
    __and__ = _operator("And")
    __le__ = _operator("LessOrEqual")
    __gt__ = _operator("Greater")
    __ge__ = _operator("GreaterOrEqual")
    equal = _operator("Equal")

    def __neg__(self) -> "Value":
        return self.graph.op("Neg", self)

    def __invert__(self) -> "Value":
        return self.graph.op("Not", self)

    def where(self, then: "Operand", other: "Operand") -> "Value":
        """Return `then` where this is true, else `other`."""
        return self.graph.op("Where", self, then, other)

    def cast(self, dtype: Any) -> "Value":
        return self.graph.op("Cast", self, to=np.dtype(dtype))

    def reshape(self, *shape: int) -> "Value":
        """Return the same numbers in another shape, in which 0 is the dimension as it was and -1 what is left."""
        return self.graph.op("Reshape", self, np.array(shape))

    def transpose(self, *order: int) -> "Value":
        return self.graph.op("Transpose", self, perm=list(order))

    def unsqueeze(self, *axes: int) -> "Value":
        return self.graph.op("Unsqueeze", self, np.array(axes))

    def slice(self, axis: int, begin: "Operand", end: "Operand" = END) -> "Value":
        begin, end = (np.array([x]) if isinstance(x, int) else x for x in (begin, end))
        return self.graph.op("Slice", self, begin, end, np.array([axis]))

    def split(self, *sizes: int) -> list["Value"]:
        """Return parts of these sizes along the last axis."""
        if len(sizes) == 1:
            return [self]
        return self.graph.ops("Split", len(sizes), self, np.array(sizes), axis=-1)

    def size(self, axis: int) -> "Value":
        """Return the size of a dimension (1,)."""
        return self.graph.op("Shape", self, start=axis, end=axis + 1)

    def sum(self) -> "Value":
        """Return the sums along the last axis, which stays as a dimension of 1."""
        return self.graph.op("ReduceSum", self, np.array([-1]))

    def max(self) -> "Value":
        """Return the maximum along the last axis, which stays as a dimension of 1."""
        return self.graph.op("ReduceMax", self, np.array([-1]))

    def pad(self, before: int, after: int, value: float) -> "Value":
        """Return a tensor (B, T, H, D) padded with `value` along its last axis."""
        return self.graph.op("Pad", self, np.array([0, 0, 0, before, 0, 0, 0, after]), np.float32(value))


Operand: TypeAlias = Value | np.ndarray | np.generic | float | int
Port: TypeAlias = tuple[str, Any, Sequence[int | str]]
"""The name, dtype and shape of an input or output."""


class Graph:
    """Nodes, weights and states, in the order in which they were added."""

    def __init__(self) -> None:
        self.states: list[State] = []
        self._output_names: dict[str, str] = {}  # names of outputs by the names of their values
        self._nodes: list[tuple[str, list[str], list[str], dict[str, Any]]] = []
        self._weights: dict[str, np.ndarray] = {}
        self._constants: dict[tuple[Any, ...], Value] = {}
        self._inputs: list[Port] = []
        self._outputs: list[Port] = []
        self._scope = ""

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the names of nodes added in this context with the name of a part of the model."""
        outer, self._scope = self._scope, f"{self._scope}{name}/"
        yield
        self._scope = outer

    def op(self, kind: str, *inputs: Operand | None, **attributes: Any) -> Value:
        """Add a node with one output."""
        return self.ops(kind, 1, *inputs, **attributes)[0]

    def ops(self, kind: str, outputs: int, *inputs: Operand | None, **attributes: Any) -> list[Value]:
        """Add a node with several outputs."""
        names = ["" if x is None else self.constant(x).name for x in inputs]
        results = [f"{self._scope}{kind}_{len(self._nodes)}{f'.{n}' if outputs > 1 else ''}" for n in range(outputs)]
        self._nodes.append((kind, names, results, attributes))
        return [Value(self, name) for name in results]

    def concat(self, *parts: Operand, axis: int) -> Value:
        return self.op("Concat", *parts, axis=axis)

    def weight(self, name: str, array: np.ndarray) -> Value:
        self._weights[name] = np.ascontiguousarray(array)
        return Value(self, name)

    def input(self, name: str, dtype: Any, shape: Sequence[int | str]) -> Value:
        self._inputs.append((name, dtype, shape))
        return Value(self, name)

    def output(self, name: str, value: Value, dtype: Any, shape: Sequence[int | str]) -> None:
        self._output_names[value.name] = name
        self._outputs.insert(0, (name, dtype, shape))

    def state(self, name: str, dtype: Any, *shape: int, grows: bool = False, in_place: bool = False) -> Value:
        """Add a state; return its value before the call. A state that `grows` begins with size 0 along its axis 2."""
        state = State(f"past.{name}", f"present.{name}", shape, np.dtype(dtype).name, in_place)
        self.states.append(state)
        before = [BATCH, *(PAST if grows and size == 0 else size for size in shape)]
        after = [BATCH, *(f"{PAST} + {TIME}" if grows and size == 0 else size for size in shape)]
        self._outputs.append((state.output, dtype, after))
        return self.input(state.input, dtype, before)

    def set_state(self, before: Value, after: Value) -> None:
        """Make `after` the output of the state whose input is `before`."""
        self._output_names[after.name] = before.name.replace("past.", "present.", 1)

    def model(self, producer: str, version: str) -> Any:
        """Return the graph as a `ModelProto` of the package `onnx`."""
        from onnx import helper, numpy_helper

        def tensor_type(dtype: Any) -> int:
            return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))

        def infos(ports: list[Port]) -> list[Any]:
            return [helper.make_tensor_value_info(name, tensor_type(dtype), shape) for name, dtype, shape in ports]

        nodes = []
        for kind, *values, attributes in self._nodes:
            inputs, outputs = ([self._output_names.get(name, name) for name in names] for names in values)
            typed: dict[str, Any] = {
                key: tensor_type(x) if isinstance(x, np.dtype) else x for key, x in attributes.items()
            }
            nodes.append(helper.make_node(kind, inputs, outputs, name=outputs[0], **typed))
        weights = [numpy_helper.from_array(array, name) for name, array in self._weights.items()]
        graph = helper.make_graph(nodes, "model", infos(self._inputs), infos(self._outputs), weights)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(FUSED, 1)]
        return helper.make_model(
            graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name=producer, producer_version=version
        )

    def constant(self, operand: Operand) -> Value:
        """Return a number or an array as a value. Python's floats become float32, its integers int64."""
        if isinstance(operand, Value):
            return operand
        array = np.asarray(operand)
        if isinstance(operand, float):
            array = array.astype(np.float32)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self.weight(f"constant_{len(self._constants)}", array)
        return self._constants[key]
