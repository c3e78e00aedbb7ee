"""A language model's weights in the memory layout of step.cpp."""

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from lmlong import recipe
from lmlong.attention.inputs import Gate
from lmlong.attention.registry import native_kinds
from lmlong.model.base import LMHead, QuantizedLMHead
from lmlong.model.block import Block, Mixer
from lmlong.model.hourglass import Hourglass
from lmlong.model.language_model import LanguageModel
from lmlong.model.layers import BFloat16Linear, GroupedLinear, Linear, RMSNorm, StackedLinear, SwiGLU
from lmlong.model.ngram_embedding import NgramEmbedding
from lmlong.model.quantization import GroupFormat, quantized
from lmlong.model.rope import rope_frequencies
from lmlong.model.short_conv import ShortConvolution
from lmlong.model.weight_panels import pack
from lmlong.native.decode import structures
from lmlong.native.decode.kind import DecodeKind
from lmlong.native.decode.packer import DTYPES, NoNativeForm, Packer
from lmlong.native.decode.structures import Dtype, OutputGate, Pooling


class PackedModel(Packer):
    """A model as addresses of its weights."""

    def __init__(self, model: LanguageModel, tables: GroupFormat | None = None):
        """`tables` is the format of embeddings, None for float32."""
        super().__init__(model)
        self._table_format = tables
        self.matrices: list[Tensor] = []
        """Weight matrices, in the order in which a token needs them."""
        self.kinds: list[DecodeKind[Any]] = []
        """The kind of each mixer's attention."""
        self._compiled = list(native_kinds().values())
        self._rotations: dict[tuple[int, str], tuple[int, structures.Rotation]] = {}
        self.known(model, LanguageModel)
        self._epsilon = self.known(model.norm, RMSNorm).epsilon
        self.model = self._language_model(model)
        self.check_complete()

    def _language_model(self, model: LanguageModel) -> structures.Model:
        embedding = self.known(model.embedding, nn.Embedding)
        whole = structures.Model(
            width=embedding.weight.shape[1],
            embedding_scale=model.embedding_scale,
            past_tokens=model.past_tokens or 0,
            norm_epsilon=self._epsilon,
            embedding=self._table(embedding, embedding.weight, self._table_format and "int8"),
            norm=self._norm(model.norm),
        )
        if model.ngram_embedding is not None:
            whole.tables = self._tables(self.known(model.ngram_embedding, NgramEmbedding))
        if model.hourglass is not None:
            whole.hourglass = self._hourglass(self.known(model.hourglass, Hourglass), model.downsampled_layers)
        layers = [layer for block in model.blocks for layer in self._block(self.known(block, Block), whole)]
        if model.hourglass is not None:
            whole.hourglass.state = whole.state_size
            whole.state_size += ctypes.sizeof(structures.HourglassState)
        layer_array = (structures.Layer * len(layers))(*layers)
        whole.layer, whole.layers = layer_array, len(layers)
        rotations = [rotation for _, rotation in self._rotations.values()]
        rotation_array = (structures.Rotation * len(rotations))(*rotations)
        whole.rotation, whole.rotations = rotation_array, len(rotations)
        self.hold(layer_array), self.hold(rotation_array)
        head = self.known(model.lm_head, LMHead, QuantizedLMHead)
        _refuse_rounded(head)
        whole.output = self._matrix(head.quantized[0] if isinstance(head, QuantizedLMHead) else head.output)
        return whole

    def _tables(self, tables: NgramEmbedding) -> structures.NgramTables:
        return structures.NgramTables(
            count=len(tables.orders),
            rows=tables.rows,
            width=tables.table.shape[1],
            orders=self.address(torch.tensor(tables.orders)),
            table=self._table(tables, tables.table, self._table_format),
            projection=self._matrix(tables.projection),
        )

    def _hourglass(self, hourglass: Hourglass, layers: range) -> structures.Hourglass:
        packed = structures.Hourglass(
            pooling=Pooling[hourglass.kind.upper()],
            factor=hourglass.factor,
            first_layer=layers.start,
            end_layer=layers.stop,
            norm=self._norm(hourglass.norm),
            out_proj=self._matrix(hourglass.out_proj),
        )
        if hourglass.convolution is not None:
            packed.conv = self._matrix(hourglass.convolution)
        return packed

    def _block(self, block: Block, whole: structures.Model) -> list[structures.Layer]:
        """Return a layer for each mixer of a block; the last one has the MLP."""
        layers = []
        for mixer in block.mixers:
            layers.append(structures.Layer())
            self._mixer(self.known(mixer, Mixer), layers[-1], whole)
        layer, mlp = layers[-1], self.known(block.mlp, SwiGLU)
        layer.mlp_norm, layer.mlp_norm_after = self._norm(mlp.norm), mlp.norm_after
        layer.mlp_in_proj = self._matrix(mlp.in_proj)
        layer.mlp_out_proj = self._matrix(mlp.out_proj)
        whole.mlp_width = layer.mlp_out_proj.inputs
        return layers

    def _mixer(self, mixer: Mixer, layer: structures.Layer, whole: structures.Model) -> None:
        attention = mixer.attention
        layer.norm, layer.norm_after = self._norm(mixer.norm), mixer.norm_after
        for name in ("query_norm", "key_norm"):
            if (norm := getattr(mixer, name)) is not None:
                setattr(layer, name, self._norm(norm))
        layer.norms_together = mixer.norms_together
        if mixer.head_norm is not None:
            norm = self.known(mixer.head_norm, RMSNorm)
            layer.head_norm = self.floats(norm, norm.gain.expand(mixer.heads, -1))
            layer.head_norm_epsilon = norm.epsilon
            self.mark_packed(norm.weight)
        layer.in_proj = self._matrix(mixer.in_proj)
        layer.out_proj = self._matrix(mixer.out_proj)
        if mixer.convolution is not None:
            convolution = self.known(mixer.convolution, ShortConvolution)
            layer.conv_weight = self.floats(convolution, convolution.weight, transposed=True)
            layer.conv_width, layer.conv_silu = convolution.width, mixer.convolution_silu
        layer.heads, layer.value_dim = mixer.heads, attention.value_dim
        layer.query_heads, layer.key_heads, layer.kv_heads = mixer.qkv_heads
        layer.uses_rope, layer.input_gated = mixer.uses_rope, mixer.input_gate_width > 0
        if mixer.gate_width:
            layer.output_gate = OutputGate[f"{mixer.gate_activation.upper()}_GATE"]
        layer.head_dim = attention.head_dim if attention.has_keys else 0
        if mixer.rotates:
            layer.rotated = mixer.rope.rotated(attention.head_dim)
            layer.cos_sin = self._rotation(attention.head_dim, mixer.rope, whole)
        kind = self._attention(mixer, layer)
        layer.grouped = kind.takes_groups
        layer.state = whole.state_size
        whole.state_size += ctypes.sizeof(structures.LayerState) + ctypes.sizeof(kind.state)

    def _rotation(self, head_dim: int, rope: recipe.Rope, whole: structures.Model) -> int:
        """Return the index of the first cosine of a rotation, which layers with equal heads share."""
        key = head_dim, rope.model_dump_json()
        if key not in self._rotations:
            frequencies = rope_frequencies(head_dim, rope)
            self._rotations[key] = whole.cos_sins, structures.Rotation(len(frequencies), self.address(frequencies))
            whole.cos_sins += 2 * len(frequencies)
        return self._rotations[key][0]

    def _attention(self, mixer: Mixer, layer: structures.Layer) -> DecodeKind[Any]:
        """Pack the attention of a layer and its gates; return its kind."""
        attention = mixer.attention
        kind = attention.native_decode
        if kind is None or kind not in self._compiled:
            raise NoNativeForm(attention, f"{type(attention).__name__} has no native decode step")
        gates = {name: getattr(mixer, gate.name) for name, gate in attention.inputs.items() if isinstance(gate, Gate)}
        weights = kind.pack(self, attention, gates)
        layer.kind, layer.attention = self._compiled.index(kind), self.hold(weights)
        self.kinds.append(kind)
        return kind

    def _norm(self, module: nn.Module) -> int:
        norm = self.known(module, RMSNorm)
        if norm.epsilon != self._epsilon:
            raise NoNativeForm(norm, "has another epsilon than the last norm; native code supports one for all norms")
        self.mark_packed(norm.weight)
        return self.floats(norm, norm.gain)

    def _table(self, module: nn.Module, rows: Tensor, group_format: GroupFormat | None) -> structures.Matrix:
        if group_format is None:
            return structures.Matrix(self.floats(module, rows), Dtype.FLOAT32, *rows.shape)
        self.mark_packed(rows)
        panels = self.hold(pack(quantized(rows, group_format)))
        return structures.Matrix(panels, Dtype[group_format.upper()], *rows.shape)

    def _matrix(self, module: nn.Module) -> structures.Matrix:
        self.known(module, Linear, StackedLinear, nn.Embedding, BFloat16Linear, GroupedLinear)
        _refuse_rounded(module)
        if isinstance(module, GroupedLinear):
            self.matrices.append(module.panels)
            dtype = Dtype[module.format.upper()]
            return structures.Matrix(self.address(module.panels), dtype, module.outputs, module.inputs)
        weight = module.weight
        assert isinstance(weight, Tensor)
        self.matrices.append(weight)
        if weight.dtype not in DTYPES:
            raise NoNativeForm(module, f"its weight is in {weight.dtype}, which native code does not support")
        return structures.Matrix(self.address(weight), DTYPES[weight.dtype], *weight.shape)


def _refuse_rounded(module: nn.Module) -> None:
    """Refuse a matrix that is rounded where it is used, as in training for quantized decoding."""
    if getattr(module, "rounding", None) is not None:
        raise NoNativeForm(module, f"computes with its weight rounded to {module.rounding}")
