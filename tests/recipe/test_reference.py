"""The reference of options is complete; docs/reference has its words, which tests/tools/test_docs.py compares."""

from lmlong.recipe import (
    ATTENTION_KINDS,
    Attention,
    Conversion,
    Downsample,
    Labels,
    Model,
    NgramEmbedding,
    Recipe,
    Rope,
    RopeScaling,
    Text,
    Training,
)
from lmlong.recipe.file import dump, recipe_class
from lmlong.recipe.kinds import candidates
from lmlong.recipe.reference import reference
from lmlong.recipe.yaml import parse_yaml

EVERY_ROPE = Rope(scaling=RopeScaling(factor=8, original_length=8192))


def leaves(values: dict, prefix: str = "") -> set[str]:
    """The dotted keys of nested sections."""
    found = set()
    for key, value in values.items():
        found |= {prefix + key} | (leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else set())
    return found


def test_every_key_is_listed_with_a_meaning() -> None:
    options = reference(recipe_class())
    model = Model(downsample=Downsample(), ngram_embedding=NgramEmbedding(), rope=EVERY_ROPE)
    text = Text(rows="documents", labels=Labels())
    every_section = Recipe(
        objective="label", text=text, training=Training(steps=1), model=model, conversion=Conversion()
    )
    resolved = leaves(parse_yaml(dump(every_section)).values)
    assert {option.key for option in options if ".N." not in option.key} == resolved
    assert [option.key for option in options[:4]] == ["format", "name", "seed", "device"]
    assert [option.key for option in options if not option.meaning] == []
    assert not [option.key for option in options if "\n" in option.meaning]


def test_candidates_of_benchmarks_are_valid_and_have_every_causal_kind() -> None:
    kinds = [Attention.model_validate(options).kind for options in candidates().values()]
    assert {kind for kind, about in ATTENTION_KINDS.items() if about.causal} == set(kinds)
