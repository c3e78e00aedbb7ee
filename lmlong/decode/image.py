"""A model and the state of one text as a block of memory, which the decode step reads in place when it is compiled to
WebAssembly, where pointers have 4 bytes. Pointers are offsets in the block, to which a web page adds its address.
"""

import ctypes
import struct
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmlong.decode.native import Buffers, code
from lmlong.decode.packed_model import PackedModel
from lmlong.model.block import BlockState
from lmlong.model.language_model import LanguageModel, ModelState
from lmlong.model.quantization import GroupFormat
from lmlong.model.state import named_tensors
from lmlong.native.decode.kind import native
from lmlong.native.decode.structures import DecodeJob, HourglassState, LayerState
from lmlong.native.source import NativeCode
from lmlong.native.state import map_state, state_tensors

ALIGNMENT = 64
"""Bytes."""
AFTER_DATA = 1 << 31
"""Stands for the end of the data while its size is not known."""

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32", torch.bool: "BOOL"}
"""The dtypes of states as safetensors names them."""


class StateTensor(NamedTuple):
    """A tensor of a state of constant size."""

    name: str
    dtype: str
    shape: list[int]
    slot: int
    """The offset of its pointer in the states of a row."""
    size: int
    """Bytes."""
    fill: int
    """The value of all bytes before the first token."""


class Image(NamedTuple):
    """The memory of a page."""

    data: bytes
    size: int
    """Bytes of the data and of all fills, which follow it."""
    fills: list[tuple[int, int, int]]
    """Offset, size and value of runs of equal bytes."""
    pointers: list[int]
    """The offsets of all pointers."""
    numbers: list[tuple[int, int]]
    """Numbers in the states of a row before the first token, with their offsets there."""
    job: int
    """The offset of the DecodeJob."""
    fields: dict[str, int]
    """The offsets of its fields in it."""
    state: list[StateTensor] | None
    """None if the state grows with the text."""


@cache
def narrow(kind: type[ctypes.Structure]) -> type[ctypes.Structure]:
    """Return a structure with pointers of 4 bytes."""
    fields = [(name, _narrow_field(field)) for name, field, *_ in kind._fields_]
    return type(kind.__name__, (ctypes.Structure,), {"_fields_": fields})


def _narrow_field(kind: Any) -> Any:
    if _is_pointer(kind):
        return ctypes.c_uint32
    return narrow(kind) if issubclass(kind, ctypes.Structure) else kind


def _is_pointer(kind: Any) -> bool:
    return kind is ctypes.c_void_p or hasattr(kind, "contents")


def page_code() -> NativeCode:
    """Return the code of the decode step in a page."""
    step = code()
    return step._replace(shared=step.shared._replace(structures=[narrow(kind) for kind in step.shared.structures]))


@torch.no_grad()
def image_of(model: LanguageModel, tables: GroupFormat | None) -> Image:
    """Return the memory of a page with a model, before the first token of a text. `tables` is the format of its
    embeddings; None is float32."""
    packed = PackedModel(model, tables)
    before, after = _states(packed, model.init_state(1))
    tokens, position, last = (torch.zeros(size, dtype=torch.int64) for size in (1, 1, packed.model.past_tokens))
    logits, hidden = torch.zeros(packed.model.output.outputs), torch.zeros(packed.model.width)
    addresses = [packed.hold(x) for x in (packed.model, tokens, position, last, logits, hidden)]
    for x in state_tensors((before, after)):
        packed.hold(x)
    memory = _Memory(packed.memory)
    rows = [memory.place_row(packed, state) for state in (before, after)]
    job = memory.place(DecodeJob(addresses[0], None, None, *addresses[1:], rows=1))
    fields = {name: getattr(narrow(DecodeJob), name).offset for name, *_ in DecodeJob._fields_}
    for name, row in zip(("states_before", "states_after"), rows, strict=True):
        memory.point(job + fields[name], row)
    state = [
        StateTensor(
            *(f"state.{name}", DTYPES[x.dtype], list(x.shape), memory.pointed[x.data_ptr()] - rows[0], x.nbytes),
            fill=int(x.flatten()[:1].view(torch.uint8)[0]),
        )
        for name, x in named_tensors(before)
        if x.data_ptr() in memory.pointed
    ]
    grows = any(kind.grows for kind in packed.kinds)
    numbers = [(offset - rows[0], value) for offset, value in memory.numbers if offset < rows[1]]
    return Image(*memory.finish(), numbers, job, fields, None if grows else state)


def _states(packed: PackedModel, state: ModelState) -> tuple[ModelState, ModelState]:
    """Return an empty state, and one for the state after a token. They share the tensors that no token changes."""
    before, after = [], []
    for kind, (attention, tail) in zip(packed.kinds, state.blocks, strict=True):
        attention, tail = kind.as_native(attention), map_state(native, tail)
        before.append(BlockState(attention, tail))
        after.append(BlockState(kind.each_written(torch.clone, attention), map_state(torch.clone, tail)))
    pooled = map_state(native, state.hourglass)
    return (
        state._replace(blocks=tuple(before), hourglass=pooled),
        state._replace(blocks=tuple(after), hourglass=map_state(torch.clone, pooled)),
    )


class _Memory:
    """A block of memory to which structures and tensors are added."""

    def __init__(self, objects: Mapping[int, Any]):
        """`objects` are those that pointers may point to, by address."""
        self.pointed: dict[int, int] = {}
        """The offset of the first pointer to an address."""
        self.numbers: list[tuple[int, int]] = []
        """The numbers in the states of rows, with their offsets."""
        self._objects = objects
        self._data, self._fills, self._pointers = bytearray(), list[tuple[int, int, int]](), list[int]()
        self._offsets: dict[int | bytes, int] = {}  # of objects by address, and of tensors by digest

    def finish(self) -> tuple[bytes, int, list[tuple[int, int, int]], list[int]]:
        """Return the data, its size with all fills, the fills and the pointers."""
        self._reserve(0)
        end = len(self._data)
        for at in self._pointers:
            (offset,) = struct.unpack_from("<I", self._data, at)
            struct.pack_into("<I", self._data, at, offset if offset < AFTER_DATA else offset - AFTER_DATA + end)
        fills = [(offset - AFTER_DATA + end, size, byte) for offset, size, byte in self._fills]
        return bytes(self._data), end + self._filled, fills, self._pointers

    def point(self, at: int, offset: int) -> None:
        """Write a pointer."""
        struct.pack_into("<I", self._data, at, offset)
        self._pointers.append(at)

    def place(self, x: Any) -> int:
        """Add a structure, an array of structures or a tensor, and return its offset."""
        if not isinstance(x, Tensor):
            parts: list[ctypes.Structure] = list(x) if isinstance(x, ctypes.Array) else [x]
            size = ctypes.sizeof(narrow(type(parts[0]))) if parts else 0
            offset = self._reserve(size * len(parts))
            for index, each in enumerate(parts):
                self._write(each, offset + index * size)
            return offset
        data = x.view(torch.uint8).flatten() if x.dim() else x[None].view(torch.uint8)
        if bool((data == data[0]).all()):
            self._fills.append((AFTER_DATA + self._filled, len(data), int(data[0])))
            return self._fills[-1][0]
        raw = data.numpy().tobytes()
        digest = sha256(raw).digest()
        if digest not in self._offsets:  # only empty states are written to, which are fills
            self._offsets[digest] = self._reserve(len(raw))
            self._data[-len(raw) :] = raw
        return self._offsets[digest]

    def place_row(self, packed: PackedModel, state: ModelState) -> int:
        """Add the states of a row, each part where it begins if pointers have 8 bytes."""
        model, offset = packed.model, self._reserve(packed.model.state_size)
        addresses = Buffers(packed.kinds, state.blocks, state.hourglass).addresses.tobytes()
        parts: list[tuple[int, type[ctypes.Structure]]]
        parts = [(model.layer[layer].state, LayerState) for layer in range(model.layers)]
        kinds = zip(parts, packed.kinds, strict=True)
        parts += [(begin + ctypes.sizeof(LayerState), kind.state) for (begin, _), kind in kinds]
        if state.hourglass is not None:
            parts.append((model.hourglass.state, HourglassState))
        for begin, kind in parts:
            self._write(kind.from_buffer_copy(addresses, begin), offset + begin, self.numbers)
        return offset

    def _write(self, x: ctypes.Structure, at: int, numbers: list[tuple[int, int]] | None = None) -> None:
        for name, kind, *_ in x._fields_:
            value, offset = getattr(x, name), at + getattr(narrow(type(x)), name).offset
            if _is_pointer(kind):
                if address := ctypes.cast(value, ctypes.c_void_p).value:
                    self.pointed.setdefault(address, offset)
                    self.point(offset, self._offset(address))
            elif isinstance(value, ctypes.Structure):
                self._write(value, offset, numbers)
            else:
                if numbers is not None:
                    numbers.append((offset, value))
                self._data[offset : offset + ctypes.sizeof(kind)] = bytes(kind(value))

    def _offset(self, address: int) -> int:
        if address not in self._offsets:
            self._offsets[address] = self.place(self._objects[address])
        return self._offsets[address]

    def _reserve(self, size: int) -> int:
        self._data.extend(bytes(-len(self._data) % ALIGNMENT))
        offset = len(self._data)
        self._data.extend(bytes(size))
        return offset

    @property
    def _filled(self) -> int:
        """Bytes of the fills so far."""
        if not self._fills:
            return 0
        offset, size, _ = self._fills[-1]
        return -(-(offset - AFTER_DATA + size) // ALIGNMENT) * ALIGNMENT
