"""Recipes of small causal language models, drawn at random over every option of the model section.

A number stands for the same recipe on every machine. Words are drawn from the declarations in lmlong.recipe, so a new
choice of an option is drawn as soon as it is declared, and changes only the recipes that have it. A new option needs a
line here, and `undrawn` tells which.
"""

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from pydantic import BaseModel
from ruamel.yaml import YAML

from lmlong import recipe
from lmlong.recipe import Recipe, file
from lmlong.recipe.kinds import ATTENTION_KINDS, FEATURE_MAP_KINDS
from lmlong.recipe.reference import choices, entry, sections, shape_of_field

CARELESS = 0.15
"""Share of the recipes of which some options are drawn by themselves, whether or not they agree with the others."""

ABSOLUTE = "absolute"  # of the positions, the one that only an encoder has
HEAD_DIMS = (1, 2, 3, 4, 5, 6, 7, 8, 8, 10, 12, 16, 17, 24, 33)


class Drawn(NamedTuple):
    """A recipe as its file holds it."""

    number: int
    values: dict[str, Any]
    careless: bool

    @property
    def yaml(self) -> str:
        text = io.StringIO()
        yaml = YAML(typ="safe", pure=True)
        yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # declared as None
        yaml.dump(self.values, text)
        return text.getvalue()

    def load(self) -> Recipe:
        """Return the recipe, written to a file and read as a user's is."""
        with TemporaryDirectory() as folder:
            path = Path(folder, "recipe.yaml")
            path.write_text(self.yaml)
            return file.load(str(path))


class Draw:
    """Draws by name, each with random numbers of its own, so that a new option changes no other."""

    def __init__(self, seed: str):
        self.seed = seed

    def __call__(self, name: str) -> Random:
        return Random(f"{self.seed} {name}")

    def word(self, name: str, words: Iterable[str]) -> str:
        """Return one of the words. A new one among them changes nothing where it is not drawn."""
        return max(words, key=lambda word: self(f"{name} {word}").random())

    def section(self, name: str) -> "Draw":
        return Draw(f"{self.seed} {name}")


def draw_recipe(number: int) -> Drawn:
    """Return the recipe of a number."""
    draw = Draw(str(number))
    careless = draw("careless").random() < CARELESS
    model = draw_careless_model(draw) if careless else draw_model(draw)
    factor = model["downsample"]["factor"] if model["downsample"] else 1
    length = draw("length").randint(8, 300) if careless else factor * draw("length").randint(8, 20)
    return Drawn(number, {"training": {"steps": 1}, "text": {"sequence_length": length}, "model": model}, careless)


def draw_model(draw: Draw) -> dict[str, Any]:
    """Return a model section whose options agree."""
    heads, head_dim = draw("heads").randint(1, 5), draw("head_dim").choice(HEAD_DIMS)
    layers = draw("layers").choice((1, 1, 2, 2, 3, 3, 4, 5))
    positions = [word for word in words(recipe.Model, "positions") if word != ABSOLUTE]
    shared = draw("shared").random() < 0.6  # the heads share the width
    attention = draw_attention(draw, [kind for kind in kinds() if ATTENTION_KINDS[kind].causal])
    pattern = [attention["kind"]] if isinstance(attention["kind"], str) else attention["kind"]
    added = draw("add_ngram").sample(range(1, layers + 1), draw("added").randint(1, layers))
    add_ngram = added if draw("any_ngram").random() < 0.3 else []
    reads_tokens = add_ngram or any(ATTENTION_KINDS[kind].reads_tokens for kind in pattern)
    shortened = layers > 1 and not reads_tokens and draw("shortened").random() < 0.5
    shares_keys = draw("shares_keys").random() < 0.3
    shape, chosen_norm = draw_shape(draw), draw("head_norm").random() < 0.6 and (True, "shared")
    needs_norm = any(ATTENTION_KINDS[kind].needs_head_norm for kind in pattern)
    if "convolution" in pattern:
        shape["convolution"] = shape["convolution"] or 3
    return {
        "width": heads * head_dim if shared else draw("width").randint(1, 60),
        "layers": layers,
        "heads": heads,
        "head_dim": None if shared else head_dim,
        "value_dim": None if draw("values").random() < 0.6 else draw("value_dim").choice(HEAD_DIMS),
        "attention": attention,
        "positions": "none" if head_dim % 2 else draw.word("positions", positions),
        "downsample": draw_downsample(draw, layers) if shortened else None,
        **shape,
        "rope": {**shape["rope"], "share": draw_share(draw, head_dim)},
        "query_key_norm": draw_norms(draw, shape["convolution"]),
        "add_ngram": add_ngram,
        "key_heads": draw("key_heads").choice(divisors(heads)) if shares_keys else None,
        "kv_heads": None if shares_keys else draw("kv_heads").choice([None, *divisors(heads)]),
        "head_norm": draw("shared_norm").choice(chosen_norm or ((True, "shared") if needs_norm else (False,))),
        "mixers": draw_mixers(draw, list(dict.fromkeys(pattern[:layers])), shares_keys),
    }


def draw_careless_model(draw: Draw) -> dict[str, Any]:
    """Return a model section in which some options have another value, whether or not it agrees with the others."""
    other = draw.section("other")
    others = {
        "width": other("width").randint(1, 40),
        "layers": other("layers").randint(1, 5),
        "heads": other("heads").randint(1, 5),
        "attention": draw_attention(other, kinds()) | {"decay": other.word("decay", words(recipe.Attention, "decay"))},
        "positions": other.word("positions", words(recipe.Model, "positions")),
        "downsample": draw_downsample(other, layers=6),
        "encoder": True,  # which no causal model is
    }
    names = other("names").sample(list(others), other("count").randint(1, 2))
    return draw_model(draw) | {name: others[name] for name in names}


def draw_shape(draw: Draw) -> dict[str, Any]:
    """Return the options of a model that agree with all others."""
    mlp = draw("mlp")
    tables = {
        "orders": draw("orders").sample(range(1, 6), draw("tables").randint(1, 3)),
        "rows": draw("rows").choice((1, 2, 7, 64, draw("more_rows").randint(1, 300))),
        "width": draw("table_width").choice((1, 2, 5, 8, 33)),
    }
    return {
        "convolution": draw("convolution").choice((0, 1, 2, 3, 4, 4, 7, 16, 64)),
        "mlp_ratio": mlp.choice((0.001, 0.1, 1.0, 2.7, round(mlp.uniform(0.5, 4), 2))),
        "dropout": draw("dropout").choice((0.0, 0.5)),
        "mlp_width": mlp.choice((None, None, mlp.randint(1, 70))),
        "convolution_activation": draw.word("activation", words(recipe.Model, "convolution_activation")),
        "input_gate": draw("input_gate").random() < 0.3,
        "norm": draw.word("norm", words(recipe.Model, "norm")),
        "head_norm_epsilon": draw("head_norm_epsilon").choice((None, None, 1e-3)),
        "centered_gains": draw("centered_gains").random() < 0.3,
        "output_gate": draw("output_gate").random() < 0.7 and draw("gate").choice((True, "sigmoid", "identity")),
        "tied_output": draw("tied_output").random() < 0.7,
        "embedding_scale": draw("embedding_scale").choice((None, None, 1.0, 3.0)),
        "rope": {
            "base": draw("rope").choice((100.0, 1e4)),
            "scaling": draw("scaled").choice((None, draw_scaling(draw))),
        },
        "norm_epsilon": draw("norm_epsilon").choice((1e-6, 1e-6, 1e-5, 1e-2)),
        "ngram_embedding": draw("ngram_embedding").choice((None, tables)),
    }


def draw_mixers(draw: Draw, kinds: list[str], shares_keys: bool) -> list[dict[str, Any]]:
    """Return the heads of some kinds, for a third of the models."""
    own = [kind for kind in kinds if draw(f"mixer {kind}").random() < 0.5] if draw("mixers").random() < 0.3 else []
    return [draw_mixer(draw.section(kind), kind, shares_keys) for kind in own]


def draw_mixer(draw: Draw, kind: str, shares_keys: bool) -> dict[str, Any]:
    heads, head_dim = draw("heads").randint(1, 5), draw("head_dim").choice(HEAD_DIMS)
    shared = shares_keys and ATTENTION_KINDS[kind].recurrent
    convolution = draw("convolution").choice((1, 5) if kind == "convolution" else (None, 0, 1, 5))
    return {
        "kind": kind,
        "heads": heads,
        "kv_heads": None if shared else draw("kv_heads").choice(divisors(heads)),
        "head_dim": head_dim,
        "value_dim": draw("value_dim").choice((None, *HEAD_DIMS)),
        "key_heads": draw("key_heads").choice(divisors(heads)) if shared else None,
        "convolution": convolution,
        "convolution_activation": draw("activation").choice((None, "none", "silu")),
        "input_gate": draw("input_gate").choice((None, True, False)),
        "query_key_norm": draw_norms(draw, convolution),
        "positions": "none" if head_dim % 2 else draw("positions").choice((None, "auto")),
        "rope": {"base": 50.0, "share": draw_share(draw, head_dim)},
        "output_gate": draw("output_gate").choice((None, True, False, "sigmoid", "identity")),
        "head_norm": ATTENTION_KINDS[kind].needs_head_norm or draw("head_norm").choice((None, True, "shared", False)),
        "head_norm_epsilon": draw("head_norm_epsilon").choice((None, 1e-3)),
        "norm": draw("norm").choice((None, "before", "after")),
    }


def draw_norms(draw: Draw, convolution: int | None) -> str:
    """Return the norms of queries and keys; those of all heads together need no convolution."""
    known = [word for word in words(recipe.Model, "query_key_norm") if word != "all" or convolution == 0]
    return draw.word("query_key_norm", known)


def draw_share(draw: Draw, head_dim: int) -> float:
    """Return a share of a head's numbers that can be rotated in pairs."""
    return draw("share").choice((1.0, 0.5, 0.25)) if not head_dim % 8 else 1.0


def divisors(number: int) -> list[int]:
    return [count for count in range(1, number + 1) if not number % count]


def draw_scaling(draw: Draw) -> dict[str, Any]:
    """Return a scaling of rotary positions."""
    return {
        "factor": draw("scaling").choice((2.0, 8.0)),
        "low_frequency_factor": draw("low").choice((0.5, 1.0)),
        "high_frequency_factor": draw("high").choice((3.0, 4.0)),
        "original_length": draw("original_length").choice((20, 50)),
    }


def draw_attention(draw: Draw, kinds: list[str]) -> dict[str, Any]:
    """Return an attention section with these kinds; it has the options of others too, which must be ignored."""
    layers = [f"kind {layer}" for layer in range(draw("pattern").choice((1, 1, 2, 3)))]
    pattern = ["linear" if draw(layer).random() < 0.3 else draw.word(layer, kinds) for layer in layers]
    some_map = draw.word("feature_map", words(recipe.Attention, "feature_map"))
    feature_map = "favor" if draw("favor").random() < 0.1 else some_map
    signed = "linear" in pattern and FEATURE_MAP_KINDS[feature_map].signed
    decays = [
        word for word in words(recipe.Attention, "decay") if word != "channel" or not (signed or "delta" in pattern)
    ]
    form, features = draw.word("form", words(recipe.Favor, "form")), draw("features")
    count = features.choice((None, 1, 2, features.randint(1, 40)))
    ngram, window = draw("ngram"), draw("window")
    return {
        "kind": pattern[0] if len(pattern) == 1 and draw("single").random() < 0.7 else pattern,
        "feature_map": feature_map,
        "decay": draw.word("decay", decays),
        "window": window.choice((1, 1, 2, 3, 4, 5, 8, 16, 17, window.randint(1, 60), 300)),
        "parallel_window": draw("parallel_window").choice((None, None, 1, 2, 5, 17)),
        "window_sink": draw("window_sink").choice((False, True)),
        "taylor": {"width": draw("taylor").choice((None, draw("taylor_width").randint(1, 9)))},
        "favor": {
            "features": count * 2 if count and form == "hyperbolic" else count,
            "form": form,
            "norms": draw.word("norms", words(recipe.Favor, "norms")),
            "resample_every": draw("resample_every").choice((None, 3)),
        },
        "delta": {
            "feature_map": draw.word("delta", words(recipe.Delta, "feature_map")),
            "max_beta": draw("max_beta").choice((1, 2)),
            "beta_bias": draw("beta_bias").choice((True, False)),
        },
        "ngram": {
            "sizes": [ngram.randint(1, 4) for _ in range(ngram.randint(1, 4))],
            "buckets": ngram.choice((1, 2, 7, 64, ngram.randint(1, 300))),
        },
        "linformer": {
            "projected": draw("projected").choice((2, [2, 3])),
            "sharing": draw.word("sharing", words(recipe.Linformer, "sharing")),
            "projection": draw.word("projection", words(recipe.Linformer, "projection")),
        },
        "longest_memory": draw("longest_memory").choice((3, 100, 8192, 65536)),
    }


def draw_downsample(draw: Draw, layers: int) -> dict[str, Any]:
    """Return a downsample section for a model of at least two layers."""
    factor, count = draw("factor"), draw("downsampled")
    return {
        "factor": factor.choice((2, 2, 3, 4, 4, 5, 8, factor.randint(2, 64), 64)),
        "kind": draw.word("downsample", words(recipe.Downsample, "kind")),
        "layers": count.randint(1, layers - 1) if layers < 3 or count.random() < 0.5 else None,
    }


def words(section: type[BaseModel], name: str) -> list[str]:
    """Return the words that an option may be."""
    return choices(shape_of_field(section.model_fields[name]))


def kinds() -> list[str]:
    """Return every attention that a recipe can name."""
    return words(recipe.Attention, "kind")


def declared(section: type[BaseModel] = recipe.Model, prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    """Iterate over the options of the model section and the sections within it: each key, dotted, with the words that
    it may be; none for a number."""
    for name, field in section.model_fields.items():
        shape = shape_of_field(field)
        if inner := sections(shape):
            yield from declared(inner[0], f"{prefix}{name}.")
            continue
        listed = entry(shape)
        of_list = choices(listed) if listed else []
        yield prefix + name, list(dict.fromkeys([*choices(shape), *of_list]))


def undrawn(recipes: Iterable[Drawn]) -> set[str]:
    """Return the declared words that no model of the recipes uses, and the other options that never change."""
    seen: dict[str, set[Any]] = {}
    for drawn in recipes:
        for key, value in _chosen(_in_use(drawn.values["model"])):
            seen.setdefault(key, set()).add(value)
    missing = set()
    for key, known in declared():
        found = seen.get(key, set())
        missing |= {f"{key}: {word}" for word in known if word not in {str(each) for each in found}}
        if not known and len(found) < 2:
            missing.add(key)
    return missing


def _in_use(model: dict[str, Any]) -> dict[str, Any]:
    """Return a drawn model section without the options of attentions and feature maps that none of its layers has."""
    attention = dict(model["attention"])
    pattern = attention["kind"] if isinstance(attention["kind"], list) else [attention["kind"]]
    attention["kind"] = pattern[: model["layers"]]
    features, recurrent = attention["feature_map"], any(ATTENTION_KINDS[kind].recurrent for kind in attention["kind"])
    owners = {
        "window": "window" in attention["kind"],
        "ngram": "ngram" in attention["kind"] or model["add_ngram"],
        "linformer": "linformer" in attention["kind"],
        **dict.fromkeys(["feature_map", "decay", "longest_memory"], "linear" in attention["kind"]),
        "parallel_window": recurrent,
        "window_sink": recurrent or "window" in attention["kind"],
        **{name: "linear" in attention["kind"] and features == name for name in ("taylor", "favor")},
    }
    return {**model, "attention": {name: value for name, value in attention.items() if owners.get(name, True)}}


def _chosen(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over the options in a drawn section with their values, those of a list one by one."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _chosen(value, f"{prefix}{name}.")
        else:
            for each in value if isinstance(value, list) else [value]:
                yield prefix + name, str(each) if isinstance(each, dict) else each
