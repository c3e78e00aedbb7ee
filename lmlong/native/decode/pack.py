"""A model's weights in the memory layout of step.cpp, made from what its modules declare.

Whatever a module declares that is not named here raises `NoNativeForm`: it would be left out in silence.
"""

from collections.abc import Collection, Sequence
from enum import IntEnum
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lmlong.native.decode import structures
from lmlong.native.decode.huge_pages import pack_in_huge_pages
from lmlong.native.decode.structures import AttentionKind, Dtype, Pooling
from lmlong.native.feature_maps import FeatureMap
from lmlong.native.spec import NativeSpec, NoNativeForm, spec_of

DTYPES = {torch.float32: Dtype.FLOAT32, torch.bfloat16: Dtype.BFLOAT16, torch.int8: Dtype.INT8}

INPUTS: dict[AttentionKind, list[tuple[str, ...]]] = {
    AttentionKind.LINEAR: [(), ("log_decay",)],
    AttentionKind.WINDOW: [()],
    AttentionKind.SOFTMAX_ATTENTION: [()],
    AttentionKind.NGRAM: [("ngram", "read_gate")],
    AttentionKind.DELTA: [("beta",), ("log_decay", "beta")],
}
"""What an attention may ask for, by its kind."""

OF_A_WINDOW = ("window_share", "rotated_q", "rotated_k")
"""What a recurrence with a window beside it asks for besides."""

ACTIVATIONS = {"log_decay": "log_sigmoid", "read_gate": "identity", "beta": "sigmoid", "window_share": "sigmoid"}
"""That of each gate."""


def packed_for_decoding(model: nn.Module) -> "PackedModel":
    """Return a packed model whose matrices have been moved, so that they lie as they are fetched."""
    pack_in_huge_pages(PackedModel(model).matrices)
    return PackedModel(model)


class PackedModel:
    """A model as addresses of its weights, which stay in memory as long as this object."""

    def __init__(self, model: nn.Module):
        self.matrices: list[Tensor] = []
        """Weight matrices, in the order in which a token needs them."""
        self._held: list[Tensor] = []
        self._known: set[int] = set()
        self.model = self._language_model(model)
        for name, weight in chain(model.named_parameters(), model.named_buffers()):
            if id(weight) not in self._known:
                raise NoNativeForm(model, f"has {name}, which native code does not know")

    def _open(
        self,
        module: Any,
        kind: str,
        options: Collection[str] = (),
        weights: Collection[str] = (),
        parts: Collection[str] = (),
    ) -> NativeSpec:
        """Return what a module declares, which must be of this kind and have these options, weights and parts alone."""
        spec = spec_of(module)
        if spec.kind != kind:
            raise NoNativeForm(module, f"is of kind {spec.kind}, where native code knows {kind}")
        for found, wanted in ((spec.options, options), (spec.weights, weights), (spec.parts, parts)):
            if differing := sorted(set(found) ^ set(wanted)):
                raise NoNativeForm(module, f"native code and the module differ about {', '.join(differing)}")
        self._known.update(map(id, spec.weights.values()))
        return spec

    def _language_model(self, module: nn.Module) -> structures.Model:
        parts = ("embedding", "blocks", "hourglass", "norm", "lm_head")
        spec = self._open(module, "language_model", ("embedding_scale", "downsampled_layers", "past_tokens"), (), parts)
        embedding = self._open(spec.parts["embedding"], "matrix", (), ("weight",)).weights["weight"]
        blocks, hourglass, inside = spec.parts["blocks"], spec.parts["hourglass"], spec.options["downsampled_layers"]
        norm = spec.parts["norm"]
        assert isinstance(embedding, Tensor) and isinstance(blocks, Sequence) and isinstance(inside, range)
        assert isinstance(norm, nn.Module)
        self._epsilon = spec_of(norm).options["epsilon"]
        whole = structures.Model(
            layers=len(blocks),
            width=embedding.shape[1],
            embedding_scale=spec.options["embedding_scale"],
            past_tokens=spec.options["past_tokens"] or 0,
            norm_epsilon=self._epsilon,
            embedding=self._floats(module, embedding),
            norm=self._norm(norm),
        )
        self._layers = (structures.Layer * len(blocks))()
        for layer, block in enumerate(blocks):
            if hourglass is not None and layer == inside.start:
                whole.hourglass = self._pooling(hourglass, inside)
            if hourglass is not None and layer == inside.stop:
                self._upsampling(hourglass, whole.hourglass)
            self._layers[layer] = self._block(block, whole)
        if hourglass is not None and inside.stop == len(blocks):
            self._upsampling(hourglass, whole.hourglass)
        whole.layer = self._layers
        head = self._open(spec.parts["lm_head"], "lm_head", (), (), ("matrix",))
        whole.output = self._matrix(head.parts["matrix"])
        return whole

    def _hourglass(self, module: Any) -> NativeSpec:
        return self._open(module, "hourglass", ("factor", "pooling"), (), ("convolution", "norm", "out_proj"))

    def _pooling(self, module: Any, layers: range) -> structures.Hourglass:
        spec = self._hourglass(module)
        packed = structures.Hourglass(
            pooling=_number(module, Pooling, spec.options["pooling"]),
            factor=spec.options["factor"],
            first_layer=layers.start,
            end_layer=layers.stop,
            norm=self._norm(spec.parts["norm"]),
        )
        if spec.parts["convolution"] is not None:
            packed.conv = self._matrix(spec.parts["convolution"])
        return packed

    def _upsampling(self, module: Any, packed: structures.Hourglass) -> None:
        packed.out_proj = self._matrix(self._hourglass(module).parts["out_proj"])

    def _block(self, module: nn.Module, whole: structures.Model) -> structures.Layer:
        spec = self._open(module, "block", (), (), ("mixer", "mlp"))
        layer = structures.Layer()
        self._mixer(spec.parts["mixer"], layer, whole)
        mlp = self._open(spec.parts["mlp"], "swiglu", (), (), ("norm", "in_proj", "out_proj"))
        layer.mlp_norm = self._norm(mlp.parts["norm"])
        layer.mlp_in_proj, layer.mlp_out_proj = (self._matrix(mlp.parts[name]) for name in ("in_proj", "out_proj"))
        whole.mlp_width = layer.mlp_out_proj.inputs
        return layer

    def _mixer(self, module: Any, layer: structures.Layer, whole: structures.Model) -> None:
        parts = ("norm", "in_proj", "convolution", "attention", "gates", "head_norm", "out_proj")
        options = ("heads", "kv_heads", "head_dim", "value_dim", "uses_rope", "frequencies", "gated", "inputs")
        spec = self._open(module, "mixer", options, (), parts)
        layer.norm = self._norm(spec.parts["norm"])
        if spec.parts["head_norm"] is not None:
            layer.head_norm = self._norm(spec.parts["head_norm"])
        layer.in_proj, layer.out_proj = self._matrix(spec.parts["in_proj"]), self._matrix(spec.parts["out_proj"])
        if spec.parts["convolution"] is not None:
            convolution = self._open(spec.parts["convolution"], "short_conv", ("width",), ("weight",))
            layer.conv_weight = self._floats(module, convolution.weights["weight"], transposed=True)
            whole.conv_width = convolution.options["width"]
        layer.attention = self._attention(spec.parts["attention"])
        layer.attention.uses_rope, layer.attention.gated = spec.options["uses_rope"], spec.options["gated"]
        self._gates(module, spec, layer.attention)
        whole.heads, whole.head_dim, whole.value_dim = (spec.options[x] for x in ("heads", "head_dim", "value_dim"))
        if layer.attention.kind != AttentionKind.NGRAM:
            whole.kv_heads = spec.options["kv_heads"]
        if spec.options["frequencies"] is not None:
            layer.attention.window_uses_rope = whole.any_rope = True
            whole.frequencies = self._address(spec.options["frequencies"])

    def _gates(self, module: nn.Module, spec: NativeSpec, packed: structures.Attention) -> None:
        names, gates, kind = spec.options["inputs"], spec.parts["gates"], AttentionKind(packed.kind)
        assert isinstance(gates, Sequence) and isinstance(names, tuple)
        beside = OF_A_WINDOW if packed.kind != AttentionKind.WINDOW and packed.window else ()
        if names not in [(*known, *beside) for known in INPUTS[kind]]:
            raise NoNativeForm(module, f"its attention asks for {', '.join(names)}, which native code does not make")
        made = [name for name in names if name in ACTIVATIONS]
        for name, part in zip(made, gates, strict=True):
            gate = self._open(part, "gate", ("activation", "shape"), ("down", "weight", "bias"))
            down = gate.weights["down"]  # of a gate for each channel
            shape = (spec.options["heads"],) if down is None else (spec.options["heads"], packed.features)
            known = gate.options == {"activation": ACTIVATIONS[name], "shape": shape}
            if not known or (down is not None and kind != AttentionKind.LINEAR):
                raise NoNativeForm(part, f"native code has no gate with {dict(gate.options)}")
            weight, bias = (self._floats(module, gate.weights[x]) for x in ("weight", "bias"))
            if down is not None:
                packed.gate_down, packed.gate_rank = self._floats(module, down), len(down)
            if name == "beta":
                packed.beta_weight, packed.beta_bias = weight, bias
            elif name == "window_share":
                packed.share_weight, packed.share_bias = weight, bias
            else:
                packed.gate_weight, packed.gate_bias = weight, bias

    def _attention(self, module: Any) -> structures.Attention:
        if spec_of(module).kind == "parallel_window":
            both = self._open(module, "parallel_window", (), (), ("recurrence", "window"))
            packed = self._attention(both.parts["recurrence"])
            packed.window = self._attention(both.parts["window"]).window
            return packed
        kind = _number(module, AttentionKind, spec_of(module).kind)
        packed = structures.Attention(kind=kind)
        if kind == AttentionKind.WINDOW:
            packed.window = self._open(module, "window", ("window",)).options["window"]
            return packed
        if kind == AttentionKind.SOFTMAX_ATTENTION:
            self._open(module, "softmax_attention")
            return packed
        if kind == AttentionKind.NGRAM:
            weights = ("number_weight", "raw_smoothing")
            spec = self._open(module, "ngram", ("sizes", "rows"), weights)
            packed.rows = spec.options["rows"]
            packed.sizes = self._address(torch.tensor(spec.options["sizes"]))
            packed.number_weight, packed.raw_smoothing = (self._floats(module, spec.weights[x]) for x in weights)
            return packed
        spec = self._open(module, kind.name.lower(), (), ("log_decay",), ("feature_map",))
        if spec.weights["log_decay"] is not None:
            packed.log_decay = self._floats(module, spec.weights["log_decay"])
        feature_map = spec.parts["feature_map"]
        if kind == AttentionKind.DELTA:
            feature_map = self._open(feature_map, "unit", ("features",), (), ("inner",)).parts["inner"]
        self._feature_map(feature_map, packed)
        return packed

    def _feature_map(self, module: Any, packed: structures.Attention) -> None:
        kind = spec_of(module).kind
        packed.feature_map = _number(module, FeatureMap, kind)
        if kind == "taylor":
            weights = ("query_projection", "key_projection")
            spec = self._open(module, kind, ("features", "inner"), weights)
            packed.inner = spec.options["inner"]
            if spec.weights["query_projection"] is not None:
                packed.query_projection, packed.key_projection = (
                    self._floats(module, spec.weights[name], transposed=True) for name in weights
                )
        elif kind == "hedgehog":
            weights = ("query_projection", "key_projection")
            spec = self._open(module, kind, ("features",), weights)
            packed.query_projection, packed.key_projection = (
                self._floats(module, spec.weights[name], transposed=True) for name in weights
            )
        elif kind == "favor":
            spec = self._open(module, kind, ("features",), ("projection", "raw_gain", "constants"))
            packed.query_projection = self._floats(module, spec.weights["projection"])
            packed.favor_constants = self._floats(module, spec.weights["constants"])
            assert spec.weights["projection"] is not None
            packed.inner = spec.weights["projection"].shape[1]
        else:
            spec = self._open(module, kind, ("features",))
        packed.features = spec.options["features"]

    def _norm(self, module: Any) -> int:
        spec = self._open(module, "rms_norm", ("epsilon",), ("weight",))
        if spec.options["epsilon"] != self._epsilon:
            raise NoNativeForm(module, "has another epsilon than the last norm, and native code one for all")
        return self._floats(module, spec.weights["weight"])

    def _matrix(self, module: Any) -> structures.Matrix:
        spec = spec_of(module)
        spec = self._open(module, "matrix", (), ("weight", "scales") if "scales" in spec.weights else ("weight",))
        weight, scales = spec.weights["weight"], spec.weights.get("scales")
        assert isinstance(weight, Tensor)
        if weight.dtype not in DTYPES:
            raise NoNativeForm(module, f"its weight is in {weight.dtype}")
        self.matrices.append(weight)
        packed_scales = None if scales is None else self._floats(module, scales)
        return structures.Matrix(self._address(weight), packed_scales, DTYPES[weight.dtype], *weight.shape)

    def _floats(self, module: nn.Module, x: Tensor | None, transposed: bool = False) -> int:
        assert x is not None
        if x.dtype != torch.float32:
            raise NoNativeForm(module, f"its weights are in {x.dtype}, and native code computes in float32")
        return self._address(x.mT if transposed else x)

    def _address(self, x: Tensor) -> int:
        self._held.append(x.detach().contiguous())
        return self._held[-1].data_ptr()


def _number(module: nn.Module, known: type[IntEnum], name: str) -> IntEnum:
    """Return the number of a name in C++."""
    if name.upper() not in known.__members__:
        raise NoNativeForm(module, f"is of kind {name}, which native code does not know")
    return known[name.upper()]
