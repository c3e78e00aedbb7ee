"""A model as step.cpp finds it in memory."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lmlong.attention.favor import Favor
from lmlong.attention.features import Cosine, Elu, FeatureMap, Relu, Softmax, Taylor
from lmlong.attention.linear import LinearAttention
from lmlong.attention.window import WindowAttention
from lmlong.model.block import Block, Mixer
from lmlong.model.downsample import Hourglass
from lmlong.model.language_model import LanguageModel
from lmlong.model.native import structures
from lmlong.model.native.pages import line_up
from lmlong.model.products import Product, Rounded
from lmlong.model.text_model import RoundedOutput

Matrix = Product | Rounded | nn.Embedding

KEPT = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
KINDS: dict[Callable[..., Any], int] = {LinearAttention: 0, WindowAttention: 1}
MAPS: dict[type[FeatureMap], int] = {Elu: 0, Relu: 1, Cosine: 2, Softmax: 3, Taylor: 4, Favor: 5}
POOLINGS = {"mean": 1, "max": 2, "conv": 3}
"""The numbers of all these in job.h."""


def fits(model: LanguageModel) -> bool:
    """Whether there is native code for all parts of a model."""
    attentions = [block.mixer.attention for block in model.blocks]
    maps = [attention.feature_map for attention in attentions if isinstance(attention, LinearAttention)]
    return (
        all(type(attention) in KINDS for attention in attentions)
        and all(type(map) in MAPS for map in maps)
        and model.embedding.weight.dtype == torch.float32
    )


def _matrices(model: LanguageModel) -> Iterator[Matrix]:
    """In the order in which a token needs them."""
    hourglass, inside = model.hourglass, model.shortened
    for layer, block in enumerate(model.blocks):
        if hourglass is not None and hourglass.convolution is not None and layer == inside.start:
            yield hourglass.convolution
        if hourglass is not None and layer == inside.stop:
            yield hourglass.project_out
        yield from (block.mixer.project_in, block.mixer.project_out, block.mlp.project_in, block.mlp.project_out)
    if hourglass is not None and inside.stop == len(model.blocks):
        yield hourglass.project_out
    yield _output(model)


def _output(model: LanguageModel) -> Matrix:
    return model.output.rounded[0] if isinstance(model.output, RoundedOutput) else model.embedding


class Layout:
    """A model by the addresses of its weights, which stay in memory as long as this does; its matrices are moved."""

    def __init__(self, model: LanguageModel):
        self._held: list[Tensor] = []
        line_up([matrix.weight for matrix in _matrices(model)])
        self._layers = (structures.Layer * len(model.blocks))(*map(self._layer, model.blocks))
        self.model = self._whole(model)

    def _whole(self, model: LanguageModel) -> structures.Model:
        block = model.blocks[0]
        whole = structures.Model(
            layers=len(model.blocks),
            width=model.embedding.embedding_dim,
            heads=block.mixer.heads,
            inner=block.mlp.project_out.weight.shape[1],
            seen=block.mixer.convolution.width if block.mixer.convolution else 0,
            turned=any(block.mixer.rotary for block in model.blocks),
            embedded=model.embedding.embedding_dim**0.5,
            embedding=self._floats(model.embedding.weight),
            norm=self._floats(model.norm.weight),
            layer=self._layers,
            output=self._matrix(_output(model)),
        )
        if model.hourglass is not None:
            whole.hourglass = self._hourglass(model.hourglass, model.shortened)
        return whole

    def _hourglass(self, hourglass: Hourglass, layers: range) -> structures.Hourglass:
        around = structures.Hourglass(
            pooling=POOLINGS[hourglass.kind],
            factor=hourglass.factor,
            first=layers.start,
            last=layers.stop,
            norm=self._floats(hourglass.norm.weight),
            project_out=self._matrix(hourglass.project_out),
        )
        if hourglass.convolution is not None:
            around.convolution = self._matrix(hourglass.convolution)
        return around

    def _layer(self, block: Block) -> structures.Layer:
        mixer, mlp = block.mixer, block.mlp
        layer = structures.Layer(
            attention=self._attention(mixer),
            norm=self._floats(mixer.norm.weight),
            head_norm=self._floats(mixer.head_norm.weight),
            inner_norm=self._floats(mlp.norm.weight),
            project_in=self._matrix(mixer.project_in),
            project_out=self._matrix(mixer.project_out),
            inner_in=self._matrix(mlp.project_in),
            inner_out=self._matrix(mlp.project_out),
        )
        if mixer.convolution is not None:
            layer.taps = self._floats(mixer.convolution.weight.mT)
        return layer

    def _attention(self, mixer: Mixer) -> structures.Attention:
        attention = mixer.attention
        about = structures.Attention(kind=KINDS[type(attention)], rotary=mixer.rotary)
        if mixer.forget is not None:
            about.forget, about.bias = self._floats(mixer.forget.weight), self._floats(mixer.forget.bias)
        if isinstance(attention, LinearAttention):
            self._describe(attention.feature_map, about)
            if attention.log_decay is not None:
                about.log_decay = self._floats(attention.log_decay)
        if isinstance(attention, WindowAttention):
            about.window = attention.window
        return about

    def _describe(self, map: FeatureMap, about: structures.Attention) -> None:
        about.map, about.features = MAPS[type(map)], map.features
        if isinstance(map, Taylor):
            about.drawn = map.inner
            about.of_queries, about.of_keys = (self._floats(x.mT) for x in (map.query_weight, map.key_weight))
        if isinstance(map, Favor):
            about.drawn = map.rows.shape[1]
            about.of_queries = self._floats(map.rows)
            length, too_large = map.bounds(map.rows)
            scale = map.gain(map.rows) * map.rows.shape[-1] ** -0.25
            about.constants = self._floats(torch.cat([scale, length.square() / 2, too_large], dim=-1))

    def _matrix(self, of: Matrix) -> structures.Matrix:
        steps = self._floats(of.steps) if isinstance(of, Rounded) and of.steps is not None else None
        return structures.Matrix(self._address(of.weight), steps, KEPT[of.weight.dtype], *of.weight.shape)

    def _floats(self, x: Tensor) -> int:
        assert x.dtype == torch.float32, x.dtype
        return self._address(x)

    def _address(self, x: Tensor) -> int:
        self._held.append(x.detach().contiguous())
        return self._held[-1].data_ptr()
