"""A model's weights in the memory layout of step.cpp."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lmlong.attention.favor import Favor
from lmlong.attention.feature_maps import Cosine, Elu, FeatureMap, Relu, Softmax, Taylor
from lmlong.attention.linear.layer import LinearAttention
from lmlong.attention.window import WindowAttention
from lmlong.model.base import QuantizedLMHead
from lmlong.model.block import Block, Mixer
from lmlong.model.decode import structures
from lmlong.model.decode.huge_pages import pack_in_huge_pages
from lmlong.model.hourglass import Hourglass
from lmlong.model.language_model import LanguageModel
from lmlong.model.layers import QuantizedLinear

Matrix = nn.Linear | QuantizedLinear | nn.Embedding

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
KINDS: dict[Callable[..., Any], int] = {LinearAttention: 0, WindowAttention: 1}
FEATURE_MAPS: dict[type[FeatureMap], int] = {Elu: 0, Relu: 1, Cosine: 2, Softmax: 3, Taylor: 4, Favor: 5}
POOLINGS = {"mean": 1, "max": 2, "conv": 3}
"""The numbers of all of these in job.h."""


def is_supported(model: LanguageModel) -> bool:
    """Return whether there is native code for all parts of a model."""
    attentions = [block.mixer.attention for block in model.blocks]
    feature_maps = [attention.feature_map for attention in attentions if isinstance(attention, LinearAttention)]
    return (
        all(type(attention) in KINDS for attention in attentions)
        and all(type(feature_map) in FEATURE_MAPS for feature_map in feature_maps)
        and model.embedding.weight.dtype == torch.float32
    )


def _matrices(model: LanguageModel) -> Iterator[Matrix]:
    """Iterate over the matrices, in the order in which a token needs them."""
    hourglass, inside = model.hourglass, model.downsampled_layers
    for layer, block in enumerate(model.blocks):
        if hourglass is not None and hourglass.convolution is not None and layer == inside.start:
            yield hourglass.convolution
        if hourglass is not None and layer == inside.stop:
            yield hourglass.out_proj
        yield from (block.mixer.in_proj, block.mixer.out_proj, block.mlp.in_proj, block.mlp.out_proj)
    if hourglass is not None and inside.stop == len(model.blocks):
        yield hourglass.out_proj
    yield _output(model)


def _output(model: LanguageModel) -> Matrix:
    return model.lm_head.quantized[0] if isinstance(model.lm_head, QuantizedLMHead) else model.embedding


class PackedModel:
    """A model as addresses of its weights, which stay in memory as long as this object; its matrices are moved."""

    def __init__(self, model: LanguageModel):
        self._held: list[Tensor] = []
        pack_in_huge_pages([matrix.weight for matrix in _matrices(model)])
        self._layers = (structures.Layer * len(model.blocks))(*map(self._layer, model.blocks))
        self.model = self._whole(model)

    def _whole(self, model: LanguageModel) -> structures.Model:
        block = model.blocks[0]
        whole = structures.Model(
            layers=len(model.blocks),
            width=model.embedding.embedding_dim,
            heads=block.mixer.heads,
            mlp_width=block.mlp.out_proj.weight.shape[1],
            conv_width=block.mixer.convolution.width if block.mixer.convolution else 0,
            any_rope=any(block.mixer.uses_rope for block in model.blocks),
            embedding_scale=model.embedding.embedding_dim**0.5,
            embedding=self._floats(model.embedding.weight),
            norm=self._floats(model.norm.weight),
            layer=self._layers,
            output=self._matrix(_output(model)),
        )
        if model.hourglass is not None:
            whole.hourglass = self._hourglass(model.hourglass, model.downsampled_layers)
        return whole

    def _hourglass(self, hourglass: Hourglass, layers: range) -> structures.Hourglass:
        packed = structures.Hourglass(
            pooling=POOLINGS[hourglass.kind],
            factor=hourglass.factor,
            first_layer=layers.start,
            end_layer=layers.stop,
            norm=self._floats(hourglass.norm.weight),
            out_proj=self._matrix(hourglass.out_proj),
        )
        if hourglass.convolution is not None:
            packed.conv = self._matrix(hourglass.convolution)
        return packed

    def _layer(self, block: Block) -> structures.Layer:
        mixer, mlp = block.mixer, block.mlp
        layer = structures.Layer(
            attention=self._attention(mixer),
            norm=self._floats(mixer.norm.weight),
            head_norm=self._floats(mixer.head_norm.weight),
            mlp_norm=self._floats(mlp.norm.weight),
            in_proj=self._matrix(mixer.in_proj),
            out_proj=self._matrix(mixer.out_proj),
            mlp_in_proj=self._matrix(mlp.in_proj),
            mlp_out_proj=self._matrix(mlp.out_proj),
        )
        if mixer.convolution is not None:
            layer.conv_weight = self._floats(mixer.convolution.weight.mT)
        return layer

    def _attention(self, mixer: Mixer) -> structures.Attention:
        attention = mixer.attention
        packed = structures.Attention(kind=KINDS[type(attention)], uses_rope=mixer.uses_rope)
        if mixer.forget_gate is not None:
            packed.gate_weight, packed.gate_bias = (
                self._floats(mixer.forget_gate.weight),
                self._floats(mixer.forget_gate.bias),
            )
        if isinstance(attention, LinearAttention):
            self._pack_feature_map(attention.feature_map, packed)
            if attention.log_decay is not None:
                packed.log_decay = self._floats(attention.log_decay)
        if isinstance(attention, WindowAttention):
            packed.window = attention.window
        return packed

    def _pack_feature_map(self, feature_map: FeatureMap, packed: structures.Attention) -> None:
        packed.feature_map, packed.features = FEATURE_MAPS[type(feature_map)], feature_map.features
        if isinstance(feature_map, Taylor):
            packed.projected = feature_map.inner
            packed.query_projection, packed.key_projection = (
                self._floats(x.mT) for x in (feature_map.query_projection, feature_map.key_projection)
            )
        if isinstance(feature_map, Favor):
            packed.projected = feature_map.projection.shape[1]
            packed.query_projection = self._floats(feature_map.projection)
            length, too_large = feature_map.bounds(feature_map.projection)
            scale = feature_map.gain(feature_map.projection) * feature_map.projection.shape[-1] ** -0.25
            packed.favor_constants = self._floats(torch.cat([scale, length.square() / 2, too_large], dim=-1))

    def _matrix(self, of: Matrix) -> structures.Matrix:
        scales = self._floats(of.scales) if isinstance(of, QuantizedLinear) and of.scales is not None else None
        return structures.Matrix(self._address(of.weight), scales, DTYPES[of.weight.dtype], *of.weight.shape)

    def _floats(self, x: Tensor) -> int:
        assert x.dtype == torch.float32, x.dtype
        return self._address(x)

    def _address(self, x: Tensor) -> int:
        self._held.append(x.detach().contiguous())
        return self._held[-1].data_ptr()
