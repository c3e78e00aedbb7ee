"""A model's weights in the memory layout of step.cpp, packed from its modules' declarations."""

import ctypes
import mmap
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from lmlong.native.decode import structures
from lmlong.native.decode.kind import DecodeKind
from lmlong.native.decode.packer import Packer, number_of
from lmlong.native.decode.structures import Pooling
from lmlong.native.spec import NativeSpec, NoNativeForm

CACHE_LINE = 64
HUGE_PAGE = 1 << 21
"""Bytes."""


def packed_for_decoding(model: nn.Module, kinds: Collection[DecodeKind[Any]]) -> "PackedModel":
    """Move the model's matrices, so that memory holds them in the order of their use. Return the packed model."""
    pack_in_huge_pages(PackedModel(model, kinds).matrices)
    return PackedModel(model, kinds)


class PackedModel(Packer):
    """A model as addresses of its weights. `kinds`: the kinds of attention that were compiled."""

    def __init__(self, model: nn.Module, kinds: Collection[DecodeKind[Any]]):
        super().__init__(model)
        self.kinds: list[DecodeKind[Any]] = []
        """The kind of each mixer's attention."""
        self._compiled = list(kinds)
        self._attentions: list[ctypes.Structure] = []
        self.model = self._language_model(model)
        self.check_all_read()

    def _language_model(self, module: nn.Module) -> structures.Model:
        spec = self.open(module, "language_model")
        embedding = self.open(spec.parts["embedding"], "matrix").weights["weight"]
        blocks, hourglass, downsampled = (
            spec.parts["blocks"],
            spec.parts["hourglass"],
            spec.options["downsampled_layers"],
        )
        assert isinstance(embedding, Tensor) and isinstance(blocks, Sequence) and isinstance(downsampled, range)
        self.epsilon = self.open(spec.parts["norm"], "rms_norm").options["epsilon"]
        whole = structures.Model(
            width=embedding.shape[1],
            embedding_scale=spec.options["embedding_scale"],
            past_tokens=spec.options["past_tokens"] or 0,
            norm_epsilon=self.epsilon,
            embedding=self.floats(module, embedding),
            norm=self.norm(spec.parts["norm"]),
        )
        if spec.parts["ngram_embedding"] is not None:
            whole.tables = self._tables(spec.parts["ngram_embedding"])
        if hourglass is not None:
            whole.hourglass = self._hourglass(hourglass, downsampled)
        layers = [layer for block in blocks for layer in self._block(block, whole)]
        self._layers = (structures.Layer * len(layers))(*layers)
        whole.layer, whole.layers = self._layers, len(layers)
        whole.output = self.matrix(self.open(spec.parts["lm_head"], "lm_head").parts["matrix"])
        return whole

    def _tables(self, module: Any) -> structures.NgramTables:
        spec = self.open(module, "ngram_embedding")
        table, orders = spec.weights["table"], spec.options["orders"]
        assert table is not None
        return structures.NgramTables(
            count=len(orders),
            rows=spec.options["rows"],
            width=table.shape[1],
            orders=self.address(torch.tensor(orders)),
            table=self.floats(module, table),
            projection=self.matrix(spec.parts["projection"]),
        )

    def _hourglass(self, module: Any, layers: range) -> structures.Hourglass:
        spec = self.open(module, "hourglass")
        packed = structures.Hourglass(
            pooling=number_of(module, Pooling, spec.options["pooling"]),
            factor=spec.options["factor"],
            first_layer=layers.start,
            end_layer=layers.stop,
            norm=self.norm(spec.parts["norm"]),
            out_proj=self.matrix(spec.parts["out_proj"]),
        )
        if spec.parts["convolution"] is not None:
            packed.conv = self.matrix(spec.parts["convolution"])
        return packed

    def _block(self, module: Any, whole: structures.Model) -> list[structures.Layer]:
        """Return a layer for each mixer of a block; the last one has the MLP."""
        spec, layers = self.open(module, "block"), []
        for mixer in (spec.parts["mixer"], spec.parts["ngram"]):
            if mixer is not None:
                layers.append(structures.Layer())
                self._mixer(mixer, layers[-1], whole)
        layer, mlp = layers[-1], self.open(spec.parts["mlp"], "swiglu")
        layer.mlp_norm = self.norm(mlp.parts["norm"])
        layer.mlp_in_proj = self.matrix(mlp.parts["in_proj"])
        layer.mlp_out_proj = self.matrix(mlp.parts["out_proj"])
        whole.mlp_width = layer.mlp_out_proj.inputs
        return layers

    def _mixer(self, module: Any, layer: structures.Layer, whole: structures.Model) -> None:
        spec = self.open(module, "mixer")
        layer.norm = self.norm(spec.parts["norm"])
        if spec.parts["head_norm"] is not None:
            layer.head_norm = self.norm(spec.parts["head_norm"])
        layer.in_proj = self.matrix(spec.parts["in_proj"])
        layer.out_proj = self.matrix(spec.parts["out_proj"])
        if spec.parts["convolution"] is not None:
            convolution = self.open(spec.parts["convolution"], "short_conv")
            layer.conv_weight = self.floats(module, convolution.weights["weight"], transposed=True)
            whole.conv_width = convolution.options["width"]
        whole.heads, whole.head_dim, whole.value_dim = (spec.options[x] for x in ("heads", "head_dim", "value_dim"))
        layer.uses_rope, layer.gated = spec.options["uses_rope"], spec.options["gated"]
        layer.kv_heads = spec.options["kv_heads"]
        layer.head_dim = whole.head_dim if spec.options["has_keys"] else 0
        if spec.options["frequencies"] is not None:
            layer.rotates = whole.any_rope = True
            whole.frequencies = self.address(spec.options["frequencies"])
        kind = self._attention(spec, layer)
        layer.grouped = kind.takes_groups
        layer.state = whole.state_size
        whole.state_size += ctypes.sizeof(structures.LayerState) + ctypes.sizeof(kind.state)

    def _attention(self, spec: NativeSpec, layer: structures.Layer) -> DecodeKind[Any]:
        """Pack the attention of a layer and its gates; return its kind."""
        attention: Any = spec.parts["attention"]
        self.open(attention)  # raises if its class declares no native form
        kind = attention.native_decode
        if kind not in self._compiled:
            raise NoNativeForm(attention, f"{type(attention).__name__} has no native decode step")
        assert isinstance(kind, DecodeKind)
        gates = spec.parts["gates"]
        assert isinstance(gates, Sequence)
        weights = kind.pack(self, attention, dict(zip(spec.options["gates"], gates, strict=True)))
        self._attentions.append(weights)
        layer.kind, layer.attention = self._compiled.index(kind), ctypes.addressof(weights)
        self.kinds.append(kind)
        return kind


def pack_in_huge_pages(weights: Sequence[Tensor]) -> None:
    """Move weights to one block of memory, in huge pages if the system has them. There are more small pages than TLB
    entries, so each token would look them all up."""
    sizes = [-(-weight.nbytes // CACHE_LINE) * CACHE_LINE for weight in weights]
    if hasattr(mmap, "MADV_HUGEPAGE"):  # file-backed or shared memory would have small pages
        memory = mmap.mmap(-1, sum(sizes) + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # not every system has them
            memory.madvise(mmap.MADV_HUGEPAGE)
    else:
        memory = mmap.mmap(-1, sum(sizes) + HUGE_PAGE)
    block = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -block.data_ptr() % HUGE_PAGE
    for weight, size in zip(weights, sizes, strict=True):
        packed = block[begin : begin + weight.nbytes].view(weight.dtype).view(weight.shape)
        weight.data = packed.copy_(weight.detach())
        begin += size
