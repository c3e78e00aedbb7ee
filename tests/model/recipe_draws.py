"""Recipes of small causal language models, drawn at random over every option of the model section.

A number stands for the same recipe on every machine. Words are drawn from the declarations in lmlong.recipe, so a new
choice of an option is drawn as soon as it is declared; a new option needs a line here, and `undrawn` tells which.
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


def draw_recipe(number: int) -> Drawn:
    """Return the recipe of a number."""
    draw = Random(number)
    careless = draw.random() < CARELESS
    model = draw_careless_model(draw) if careless else draw_model(draw)
    factor = model["downsample"]["factor"] if model["downsample"] else 1
    length = draw.randint(8, 300) if careless else factor * draw.randint(8, 20)
    return Drawn(number, {"training": {"steps": 1}, "text": {"sequence_length": length}, "model": model}, careless)


def draw_model(draw: Random) -> dict[str, Any]:
    """Return a model section whose options agree."""
    heads, head_dim, layers = draw.randint(1, 5), draw.choice(HEAD_DIMS), draw.choice((1, 1, 2, 2, 3, 3, 4, 5))
    positions = [word for word in words(recipe.Model, "positions") if word != ABSOLUTE]
    shared = draw.random() < 0.6  # the heads share the width
    model = {
        "width": heads * head_dim if shared else draw.randint(1, 60),
        "layers": layers,
        "heads": heads,
        "head_dim": None if shared else head_dim,
        "value_dim": None if draw.random() < 0.6 else draw.choice(HEAD_DIMS),
        "attention": draw_attention(draw, [kind for kind in kinds() if ATTENTION_KINDS[kind].causal]),
        "positions": "none" if head_dim % 2 else draw.choice(positions),
        "downsample": draw_downsample(draw, layers) if layers > 1 and draw.random() < 0.5 else None,
        **draw_shape(draw),
    }
    # drawn apart, so that all else is drawn as it was without it
    model["add_ngram"] = draw_added(Random(str(draw.getstate()[1][:9])), layers)
    pattern = model["attention"]["kind"]
    pattern = [pattern] if isinstance(pattern, str) else pattern
    if model["add_ngram"] or any(ATTENTION_KINDS[kind].reads_tokens for kind in pattern):
        model["downsample"] = None
    model |= {
        "kv_heads": draw.choice([None, *(count for count in range(1, heads + 1) if not heads % count)]),
        "head_norm": "delta" in pattern or draw.random() < 0.6,
    }
    # drawn apart, as the added heads
    model["mixers"] = draw_mixers(Random(str(draw.getstate()[1][9:18])), list(dict.fromkeys(pattern[:layers])))
    favor = model["attention"]["favor"]
    if favor["form"] == "hyperbolic" and favor["features"]:
        favor["features"] *= 2
    return model


def draw_careless_model(draw: Random) -> dict[str, Any]:
    """Return a model section in which some options have another value, whether or not it agrees with the others."""
    others = {
        "width": draw.randint(1, 40),
        "layers": draw.randint(1, 5),
        "heads": draw.randint(1, 5),
        "attention": draw_attention(draw, kinds()) | {"decay": draw.choice(words(recipe.Attention, "decay"))},
        "positions": draw.choice(words(recipe.Model, "positions")),
        "downsample": draw_downsample(draw, layers=6),
    }
    return draw_model(draw) | {name: others[name] for name in draw.sample(list(others), draw.randint(1, 2))}


def draw_shape(draw: Random) -> dict[str, Any]:
    """Return the options of a model that agree with all others."""
    return {
        "convolution": draw.choice((0, 1, 2, 3, 4, 4, 7, 16, 64)),
        "mlp_ratio": draw.choice((0.001, 0.1, 1.0, 2.7, round(draw.uniform(0.5, 4), 2))),
        "dropout": draw.choice((0.0, 0.5)),
        "mlp_width": draw.choice((None, None, draw.randint(1, 70))),
        "output_gate": draw.random() < 0.7,
        "tied_output": draw.random() < 0.7,
        "embedding_scale": draw.choice((None, None, 1.0, 3.0)),
        "rope": {"base": draw.choice((100.0, 1e4)), "scaling": draw.choice((None, draw_scaling(draw)))},
        "norm_epsilon": draw.choice((1e-6, 1e-6, 1e-5, 1e-2)),
        # drawn apart, so that all else is drawn as it was without it
        "ngram_embedding": draw_tables(Random(str(draw.getstate()[1][:9]))),
    }


def draw_mixers(draw: Random, kinds: list[str]) -> list[dict[str, Any]]:
    """Return the heads of some kinds, for a third of the models."""
    return [draw_mixer(draw, kind) for kind in kinds if draw.random() < 0.5] if draw.random() < 0.3 else []


def draw_mixer(draw: Random, kind: str) -> dict[str, Any]:
    heads, head_dim = draw.randint(1, 5), draw.choice(HEAD_DIMS)
    return {
        "kind": kind,
        "heads": heads,
        "kv_heads": draw.choice([count for count in range(1, heads + 1) if not heads % count]),
        "head_dim": head_dim,
        "value_dim": draw.choice((None, *HEAD_DIMS)),
        "convolution": draw.choice((None, 0, 1, 5)),
        "positions": "none" if head_dim % 2 else draw.choice((None, "auto")),
        "rope": draw.choice((None, {"base": 50.0})),
        "output_gate": draw.choice((None, True, False)),
        "head_norm": True if kind == "delta" else draw.choice((None, True, False)),
    }


def draw_tables(draw: Random) -> dict[str, Any] | None:
    """Return a section of tables of n-grams, for half of the models."""
    tables = {
        "orders": draw.sample(range(1, 6), draw.randint(1, 3)),
        "rows": draw.choice((1, 2, 7, 64, draw.randint(1, 300))),
        "width": draw.choice((1, 2, 5, 8, 33)),
    }
    return draw.choice((None, tables))


def draw_added(draw: Random, layers: int) -> list[int]:
    """Return the layers that get n-gram heads; none in most models."""
    return draw.sample(range(1, layers + 1), draw.randint(1, layers)) if draw.random() < 0.3 else []


def draw_scaling(draw: Random) -> dict[str, Any]:
    """Return a scaling of rotary positions."""
    return {
        "factor": draw.choice((2.0, 8.0)),
        "low_frequency_factor": draw.choice((0.5, 1.0)),
        "high_frequency_factor": draw.choice((3.0, 4.0)),
        "original_length": draw.choice((20, 50)),
    }


def draw_attention(draw: Random, kinds: list[str]) -> dict[str, Any]:
    """Return an attention section with these kinds; it has the options of others too, which must be ignored."""
    pattern = [draw.choice([*kinds, "linear", "linear"]) for _ in range(draw.choice((1, 1, 2, 3)))]
    feature_map = draw.choice([*words(recipe.Attention, "feature_map"), "favor"])
    signed = "linear" in pattern and FEATURE_MAP_KINDS[feature_map].signed
    decays = [
        word for word in words(recipe.Attention, "decay") if word != "channel" or not (signed or "delta" in pattern)
    ]
    return {
        "kind": pattern[0] if len(pattern) == 1 and draw.random() < 0.7 else pattern,
        "feature_map": feature_map,
        "decay": draw.choice(decays),
        "window": draw.choice((1, 1, 2, 3, 4, 5, 8, 16, 17, draw.randint(1, 60), 300)),
        # drawn apart, so that all else is drawn as it was without it
        "parallel_window": Random(str(draw.getstate()[1][:9])).choice((None, None, 1, 2, 5, 17)),
        "window_sink": Random(str(draw.getstate()[1][:8])).choice((False, True)),
        "taylor": {"width": draw.choice((None, draw.randint(1, 9)))},
        "favor": {
            "features": draw.choice((None, 1, 2, draw.randint(1, 40))),
            "form": draw.choice(words(recipe.Favor, "form")),
            "norms": draw.choice(words(recipe.Favor, "norms")),
            "resample_every": draw.choice((None, 3)),
        },
        "delta": {"feature_map": draw.choice(words(recipe.Delta, "feature_map"))},
        "ngram": {
            "sizes": [draw.randint(1, 4) for _ in range(draw.randint(1, 4))],
            "buckets": draw.choice((1, 2, 7, 64, draw.randint(1, 300))),
        },
        "linformer": {
            "projected": draw.choice((2, [2, 3])),
            "sharing": draw.choice(words(recipe.Linformer, "sharing")),
            "projection": draw.choice(words(recipe.Linformer, "projection")),
        },
        "longest_memory": draw.choice((3, 100, 8192, 65536)),
    }


def draw_downsample(draw: Random, layers: int) -> dict[str, Any]:
    """Return a downsample section for a model of at least two layers."""
    return {
        "factor": draw.choice((2, 2, 3, 4, 4, 5, 8, draw.randint(2, 64), 64)),
        "kind": draw.choice(words(recipe.Downsample, "kind")),
        "layers": draw.randint(1, layers - 1) if layers < 3 or draw.random() < 0.5 else None,
    }


def words(section: type[BaseModel], name: str) -> list[str]:
    """Return the words that an option may be."""
    return choices(shape_of_field(section.model_fields[name]))


def kinds() -> list[str]:
    """Return every attention that a recipe can name."""
    return words(recipe.Attention, "kind")


class Option(NamedTuple):
    """An option of the model section."""

    key: str  # dotted, below the section
    words: list[str]  # that it may be; none for a number


def declared(section: type[BaseModel] = recipe.Model, prefix: str = "") -> Iterator[Option]:
    """Iterate over the options of the model section and the sections within it."""
    for name, field in section.model_fields.items():
        shape = shape_of_field(field)
        if inner := sections(shape):
            yield from declared(inner[0], f"{prefix}{name}.")
            continue
        listed = entry(shape)
        of_list = choices(listed) if listed else []
        yield Option(prefix + name, list(dict.fromkeys([*choices(shape), *of_list])))


def undrawn(recipes: Iterable[Drawn]) -> set[str]:
    """Return the declared words that no model of the recipes uses, and the other options that never change."""
    seen: dict[str, set[Any]] = {}
    for drawn in recipes:
        for key, value in _chosen(_in_use(drawn.values["model"])):
            seen.setdefault(key, set()).add(value)
    missing = set()
    for option in declared():
        found = seen.get(option.key, set())
        missing |= {f"{option.key}: {word}" for word in option.words if word not in found}
        if not option.words and len(found) < 2:
            missing.add(option.key)
    return missing


def _in_use(model: dict[str, Any]) -> dict[str, Any]:
    """Return a drawn model section without the options of attentions and feature maps that none of its layers has."""
    attention = dict(model["attention"])
    pattern = attention["kind"] if isinstance(attention["kind"], list) else [attention["kind"]]
    attention["kind"] = pattern[: model["layers"]]
    features = attention["feature_map"]
    owners = {
        "window": "window" in attention["kind"],
        "ngram": "ngram" in attention["kind"] or model["add_ngram"],
        "linformer": "linformer" in attention["kind"],
        **dict.fromkeys(["feature_map", "decay", "longest_memory"], "linear" in attention["kind"]),
        "parallel_window": {"linear", "delta"} & set(attention["kind"]),
        "window_sink": {"linear", "delta", "window"} & set(attention["kind"]),
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
