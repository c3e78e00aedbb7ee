"""Architectures of pretrained models: the options of the same model in a recipe, and the mapping of its weights."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from pydantic import AliasChoices, Field, ValidationError
from torch import Tensor

from lmlong import recipe
from lmlong.errors import CheckpointError, RecipeError
from lmlong.io.checked import Checked, shown
from lmlong.recipe import bounds

Size = Annotated[int, Field(gt=0, le=bounds.WIDTH)]
Length = Annotated[int, Field(gt=0, le=bounds.TOKENS)]
Base = Annotated[float, Field(gt=1, le=1e12)]
Factor = Annotated[float, Field(gt=0, le=1e6)]
Epsilon = Annotated[float, Field(gt=0, le=1)]


class RopeParameters(Checked):
    """Rotary positions: `rope_parameters` since transformers 5, `rope_scaling` before."""

    rope_type: str = Field("default", validation_alias=AliasChoices("rope_type", "type"))
    rope_theta: Base | None = None
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    factor: Factor | None = None
    low_freq_factor: Factor | None = None
    high_freq_factor: Factor | None = None
    original_max_position_embeddings: Length | None = None


class Config(Checked):
    """The values of config.json that all architectures have."""

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Annotated[int, Field(gt=0, le=10_000)]
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    vocab_size: Annotated[int, Field(gt=0, le=bounds.VOCABULARY)] | None = None
    max_position_embeddings: Annotated[int, Field(ge=8, le=bounds.TOKENS)] = 2048
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    rms_norm_eps: Epsilon = 1e-6
    rope_parameters: RopeParameters | None = None
    layer_types: Annotated[list[str], Field(min_length=1, max_length=10_000)] | None = None

    @property
    def key_value_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def default_head_dim(self) -> int:
        return max(1, self.hidden_size // self.num_attention_heads)


class Part(NamedTuple):
    """A weight of lmlong as weights of an architecture. A name may be several, with | between them: the first that a
    file has is read, and the first is written."""

    names: Sequence[str]
    join: Callable[[list[Tensor]], Tensor] = torch.cat
    split: Callable[[Tensor], Sequence[Tensor]] = lambda weight: [weight]


def first_name(names: str) -> str:
    """Return the first of the names of a weight."""
    return names.partition("|")[0]


def rows(heights: Sequence[int], *names: str) -> Part:
    """Return a matrix whose rows are those of several matrices."""
    return Part(names, torch.cat, lambda weight: weight.split(list(heights)))


def taps(heights: Sequence[int], *names: str) -> Part:
    """Return the weight (C, W) of a convolution that several weights (C, 1, W) make."""
    return Part(
        names,
        lambda parts: torch.cat([part.squeeze(1) for part in parts]),
        lambda weight: [part.unsqueeze(1) for part in weight.split(list(heights))],
    )


C = TypeVar("C", bound=Config)


class Architecture(ABC, Generic[C]):
    """An architecture of transformers."""

    name: ClassVar[str]
    """transformers' class, the value of `architectures` in config.json."""
    loads: ClassVar[tuple[str, ...]] = ()
    """Other classes whose weights it has."""
    config: type[C]
    outer: ClassVar[Mapping[str, str]] = {
        "embedding.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "lm_head.output.weight": "lm_head.weight",
    }
    left_out: ClassVar[Mapping[str, str]] = {}
    """Weights that are not imported, patterns of their names, and what they are."""
    renamed: ClassVar[tuple[str, str]] = ("", "")
    """A prefix of weights in some files, and what it is replaced by."""

    @abstractmethod
    def options(self, config: C) -> dict[str, Any]:
        """Return the options of the same model in a recipe."""

    @abstractmethod
    def layer(self, model: recipe.Model, kind: str) -> Mapping[str, Part]:
        """Return the weights of a layer of a kind, by lmlong's names in a block; transformers' names are those in a
        layer."""

    @abstractmethod
    def values(self, model: recipe.Model) -> dict[str, Any]:
        """Return the values of config.json of a model that this architecture may have made, without those that all
        have."""

    def tied(self, config: C) -> bool:
        """Return whether the output layer has the weights of the embedding."""
        return config.tie_word_embeddings

    def part(self, name: str, model: recipe.Model) -> Part:
        """Return how a weight of lmlong is made."""
        if name in self.outer:
            return Part([self.outer[name]])
        _, layer, inside = name.split(".", 2)
        part, begin = self.layer(model, model.kinds[int(layer)])[inside], f"model.layers.{layer}."
        return part._replace(names=["|".join(begin + name for name in names.split("|")) for names in part.names])

    def config_of(self, chosen: recipe.Recipe, vocabulary: int) -> dict[str, Any] | None:
        """Return config.json of a run whose model is of this architecture; None if it is not."""
        model = chosen.model
        if not self.may_be(model):
            return None
        values = {
            "architectures": [self.name],
            "vocab_size": vocabulary,
            "hidden_size": model.width,
            "intermediate_size": model.inner_width,
            "num_hidden_layers": model.layers,
            "rms_norm_eps": model.norm_epsilon,
            "tie_word_embeddings": model.tied_output,
            "use_cache": True,
            "max_position_embeddings": chosen.text.sequence_length,
            **self.values(model),
        }
        try:
            again = recipe.Model(**self.options(self.config.model_validate(values)))
        except (RecipeError, ValidationError, CheckpointError):
            return None
        return values if facts(again) == facts(model) else None

    def may_be(self, model: recipe.Model) -> bool:
        """Return whether `values` can be called."""
        return True


def facts(model: recipe.Model) -> dict[str, Any]:
    """Return all that determines what a causal model computes, however its recipe says it."""
    names = ["layers", "width", "inner_width", "norm_epsilon", "centered_gains", "tied_output"]
    names += ["downsample", "ngram_embedding", "add_ngram"]
    scale = model.embedding_scale or model.width**0.5
    kinds = {kind: _facts_of_kind(model.of_kind(kind), kind) for kind in model.mixer_kinds}
    return {**{name: getattr(model, name) for name in names}, "scale": scale, "order": model.kinds, "kinds": kinds}


def _facts_of_kind(own: recipe.Model, kind: str) -> dict[str, Any]:
    about, attention = recipe.ATTENTION_KINDS[kind], own.attention
    facts: dict[str, Any] = {name: getattr(own, name) for name in ("heads", "convolution", "input_gate", "norm")}
    facts |= {"gate": own.output_gate, "silu": own.convolution > 0 and own.convolution_activation}
    facts["value_dim"] = own.head_dims.value
    if about.has_keys:
        rope = own.rope if own.uses_rope(kind) else None
        facts |= {"key_dim": own.head_dims.key, "rope": rope, "norms": own.query_key_norm}
        facts["kv_heads"] = own.kv_heads or own.heads
    if kind != "convolution":
        facts["head_norm"] = own.head_norm and (own.head_norm, own.head_norm_epsilon or own.norm_epsilon)
    if about.recurrent:
        facts |= {"key_heads": own.key_heads, "decay": attention.decay, "window": attention.parallel_window}
    if kind not in ("softmax", "convolution", "delta"):  # none of whose options an architecture here has
        facts["attention"] = attention
    return facts | ({"delta": attention.delta} if kind == "delta" else {})


class Source(NamedTuple):
    """A pretrained model in a file or folder."""

    name: str  # for messages
    architecture: Architecture[Any]
    config: Config
    shapes: Mapping[str, tuple[int, ...]]  # of its weights, by transformers' names
    dtypes: Mapping[str, torch.dtype]  # that hold them exactly
    read: Callable[[str], Tensor]
    tokenizer: Callable[[], bytes]  # the file of a tokenizer
    left_out: Sequence[str] = ()  # in words

    @property
    def model(self) -> recipe.Model:
        """The options of the same model. Raise CheckpointError if lmlong does not support a part of it."""
        config = self.config
        for key in ("attention_bias", "mlp_bias", "conv_bias"):
            if getattr(config, key, False):
                raise CheckpointError(f"{self.name}: {key} is set; biases are not supported. Use a model without.")
        if config.hidden_act != "silu":
            raise CheckpointError(
                f"{self.name}: its MLP is gated by {shown(config.hidden_act)}; only silu is supported. "
                "Use another model."
            )
        try:
            return recipe.Model(**self.architecture.options(config))
        except CheckpointError as error:
            raise CheckpointError(f"{self.name}: {error}") from None
        except (RecipeError, ValidationError) as error:
            raise CheckpointError(f"{self.name}: invalid sizes ({error}) Use another model.") from None

    def part(self, name: str, model: recipe.Model) -> Part:
        """Return how a weight of lmlong is made, with the names that the file has."""
        part = self.architecture.part(name, model)
        return part._replace(names=[self._own(names) for names in part.names])

    def _own(self, names: str) -> str:
        """Return the first name that the file has."""
        return next((name for name in names.split("|") if name in self.shapes), first_name(names))

    def dtype(self, part: Part) -> torch.dtype:
        """Return the dtype that holds all weights of a part."""
        first, *rest = (self.dtypes[name] for name in part.names)
        for dtype in rest:
            first = torch.promote_types(first, dtype)
        return first

    def vocabulary(self) -> int | None:
        """Return the number of rows of the embedding."""
        return next(iter(self.shapes.get("model.embed_tokens.weight", ())), None)


def pattern(kinds: Sequence[str]) -> str | list[str]:
    """Return the shortest pattern that repeats to the kinds of all layers."""
    for size in range(1, len(kinds) + 1):
        if all(kind == kinds[number % size] for number, kind in enumerate(kinds)):
            return kinds[0] if size == 1 else list(kinds[:size])
    raise AssertionError("the kinds themselves are such a pattern")


def layer_kinds(config: Config, known: Mapping[str, str], usual: Sequence[str]) -> list[str]:
    """Return the kind of each layer by its name in config.json, `usual` if that has none."""
    types = config.layer_types or usual
    if len(types) != config.num_hidden_layers:
        raise CheckpointError(f"layer_types names {len(types):,} layers, and there are {config.num_hidden_layers:,}.")
    if unknown := [name for name in types if name not in known]:
        raise CheckpointError(f"layer_types has {shown(unknown[0])}; known are {', '.join(known)}. Use another model.")
    return [known[name] for name in types]


def only_used(mixers: Sequence[recipe.Mixer], kinds: Sequence[str]) -> list[recipe.Mixer]:
    """Return the mixers of kinds that a model has."""
    return [mixer for mixer in mixers if mixer.kind in kinds]


def plain_base(rope: RopeParameters | None, base: float) -> float:
    """Return the base of rotary positions that are not scaled."""
    if rope is not None and rope.rope_type != "default":
        raise CheckpointError(f"its rotary positions are scaled by {shown(rope.rope_type)}. Use another model.")
    return (rope.rope_theta if rope else None) or base


MLP = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")


def mlp_parts(model: recipe.Model, norm: str, names: Sequence[str] = MLP) -> dict[str, Part]:
    """Return the parts of the MLP of a layer; `names` are those of gate, values and output."""
    gate, up, down = names
    return {
        "mlp.norm.weight": Part([norm]),
        "mlp.in_proj.weight": rows([model.inner_width] * 2, gate, up),
        "mlp.out_proj.weight": Part([down]),
    }


QKV = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")


def softmax_heights(own: recipe.Model) -> list[int]:
    """Return the numbers of rows of the projections to queries, keys and values."""
    keys = (own.kv_heads or own.heads) * own.head_dims.key
    return [own.heads * own.head_dims.key, keys, keys]


def softmax_parts(
    own: recipe.Model, in_proj: Part | None = None, norms: str | None = "norm", out: str = "o_proj"
) -> dict[str, Part]:
    """Return the parts of the softmax attention of a layer. `norms` is the name of those of queries and keys, if it has
    any."""
    pairs = () if norms is None else (("query", f"q_{norms}"), ("key", f"k_{norms}"))
    return {
        "mixer.in_proj.weight": in_proj or rows(softmax_heights(own), *QKV),
        **{f"mixer.{ours}_norm.weight": Part([f"self_attn.{theirs}.weight"]) for ours, theirs in pairs},
        "mixer.out_proj.weight": Part([f"self_attn.{out}.weight"]),
    }


def softmax_values(model: recipe.Model) -> dict[str, Any]:
    """Return the heads of the softmax layers as values of config.json."""
    own = model.of_kind("softmax")
    return {"num_attention_heads": own.heads, "num_key_value_heads": own.kv_heads or own.heads}


def check_layers(source: Source) -> None:
    """Raise CheckpointError if the number of layers differs from the configuration, before a model is built."""
    numbers = {name.split(".")[2] for name in source.shapes if re.match(r"model\.layers\.\d+\.", name)}
    if len(numbers) != source.config.num_hidden_layers:
        raise CheckpointError(
            f"{source.name}: num_hidden_layers is {source.config.num_hidden_layers:,}, but there are weights of "
            f"{len(numbers):,} layers. Use a complete model."
        )


def check_weights(source: Source, model: recipe.Model, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError, which lists all mistakes, unless the weights have these `shapes`."""
    mistakes = list(_mistakes(source, model, shapes))
    if mistakes:
        listed = "".join(f"\n  {mistake}" for mistake in mistakes[:20])
        more = f"\n  and {len(mistakes) - 20} more" if len(mistakes) > 20 else ""
        raise CheckpointError(f"{source.name}: the weights do not match the configuration:{listed}{more}")


def _mistakes(source: Source, model: recipe.Model, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    expected = set[str]()
    for name, shape in shapes.items():
        part = source.part(name, model)
        expected.update(part.names)
        if missing := [own for own in part.names if own not in source.shapes]:
            yield from (f"{own}: missing" for own in missing)
            continue
        sizes = [source.shapes[own] for own in part.names]
        try:
            joined = tuple(part.join([torch.empty(size, device="meta") for size in sizes]).shape)
        except (RuntimeError, IndexError):
            joined = ()
        if joined != shape:
            wanted = [tuple(piece.shape) for piece in part.split(torch.empty(shape, device="meta"))]
            yield f"{' + '.join(part.names)}: {' + '.join(map(str, sizes))}, not {' + '.join(map(str, wanted))}"
    yield from (f"{name}: unknown weight" for name in source.shapes if name not in expected)
