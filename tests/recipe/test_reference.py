"""The reference of options is complete and says in words what the declarations say in types."""

from lmlong.recipe import (
    ATTENTION_KINDS,
    Attention,
    Conversion,
    Downsample,
    Model,
    NgramEmbedding,
    Recipe,
    Rope,
    RopeScaling,
    Training,
)
from lmlong.recipe.file import dump, recipe_class
from lmlong.recipe.kinds import candidates
from lmlong.recipe.reference import Option, reference
from lmlong.recipe.yaml import parse_yaml

KINDS = ", ".join(ATTENTION_KINDS)
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
    every_section = Recipe(training=Training(steps=1), model=model, conversion=Conversion())
    resolved = leaves(parse_yaml(dump(every_section)).values)
    assert {option.key for option in options if ".N." not in option.key} == resolved
    assert [option.key for option in options[:4]] == ["format", "name", "seed", "device"]
    assert [option.key for option in options if not option.meaning] == []
    assert not [option.key for option in options if "\n" in option.meaning]


def test_an_option_is_described_in_plain_words() -> None:
    options = {(option.key, option.kind): option for option in reference(recipe_class())}
    assert options["model.width", None] == Option(
        "model.width",
        "a whole number, above 0",
        False,
        256,
        "Size of a token's vector between blocks.",
        None,
    )
    assert options["training.steps", None].type == "a whole number, above 0, or null"
    assert options["training", None].type == "a section"
    assert not options["training", None].required
    assert options["model.attention.kind", None].type == (f"one of {KINDS} or a list of 1 or more, each one of {KINDS}")
    listed = options["model.attention.kind", None].meaning
    assert all(about.summary and f"{kind} ({about.summary}" in listed for kind, about in ATTENTION_KINDS.items())
    assert options["text.sources", None].type == "a list of 1 or more, each a section of kind python-stdlib, files, hub"
    assert options["text.sources", None].default == [{"kind": "python-stdlib", "weight": 1.0}]
    assert options["text.sources.N.paths", "files"].required
    assert options["text.sources.N.dataset", "hub"].type == "text"
    assert options["text.validation.sources.N.weight", "python-stdlib"].default == 1.0


def test_candidates_of_benchmarks_are_valid_and_have_every_causal_kind() -> None:
    kinds = [Attention.model_validate(options).kind for options in candidates().values()]
    assert {kind for kind, about in ATTENTION_KINDS.items() if about.causal} == set(kinds)
