"""All mistakes of a recipe are reported at once: one sentence each, at its line or with its override."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmlong.errors import RecipeError
from lmlong.recipe import ATTENTION_KINDS, Attention, Model, Recipe, Training
from lmlong.recipe.file import load, recipe_class
from lmlong.recipe.reference import reference

from .conftest import Complaints, Loaded

ENOUGH = "training: {steps: 1}\n"
KINDS = ", ".join(ATTENTION_KINDS)
SOURCES = "python-stdlib, files, hub"
TWICE = "given twice, first on line 1. Keep one of them."
INDIVISIBLE = "model.heads: 4 heads do not divide a width of 250. Use a divisor, or give model.head_dim."
BOTH_STATES = "state_passing: with carry_state, no row begins with the state of another text. Use one of them."
UNITS = "expected a whole number (or such as 4k, 1m)"
EMPTY = "file: the file is empty. A recipe needs at least training: {steps: ...}."
UNKNOWN = "unknown key"
KNOWN = "Known here: kind, paths, column, soft_masks, weight."
OF_HUB = "It needs another kind. Write 'text.sources=[{kind: hub, dataset: \"x\"}]'."
LISTED = "`lmlong recipe options training` lists all."
SEED = "expected a whole number, at least 0, below 4294967296"
NAMES = "expected one or more file names, such as a.txt,b.txt"
GROWS = "the state of softmax attention grows"
FLOW = "while parsing a flow node"
FILES = "text:\n  sources: [{{kind: files, paths: [a.txt], {}: x}}]\n"

SEVERAL: dict[str, list[str]] = {
    """\
nmae: x
training:
  steps: 2e3
  compile: yes
model:
  widht: 128
  width: 64
  width: null
  heads: -1
  mlp_ratio: .inf
""": [
        "file:1: nmae: unknown key. Did you mean 'name'?",
        "file:3: training.steps: expected a whole number, above 0, or null, got 2000.0. Write 2000.",
        "file:4: training.compile: expected true or false, got 'yes'.",
        "file:6: model.widht: unknown key. Did you mean 'width'?",
        "file:8: model.width: given twice, first on line 7. Keep one of them.",
        "file:8: model.width: expected a whole number, above 0, got nothing.",
        "file:9: model.heads: expected a whole number, above 0, got -1.",
        "file:10: model.mlp_ratio: expected a number, above 0, at most 1024, got inf.",
    ],
    """\
text:
  sources:
    - kind: fils
    - weight: 1
    - {kind: files, paths: [1], files: [a]}
    - 3
    - {kind: files, paths: []}
    - {kind: files, paths: {a: b}}
    - kind: hub
    - {kind: [hub]}
""": [
        f"file:3: text.sources.0.kind: 'fils' is not one of {SOURCES}. Did you mean 'files'?",
        f"file:4: text.sources.1.kind: missing. Expected one of {SOURCES}.",
        "file:5: text.sources.2.paths.0: expected text, got 1. Put it in quotes.",
        f"file:5: text.sources.2.files: {UNKNOWN}. {KNOWN}",
        f"file:6: text.sources.3: expected a section of kind {SOURCES}, got 3.",
        f"file:7: text.sources.4.paths: {NAMES}, got an empty list.",
        f"file:8: text.sources.5.paths: {NAMES}, got a section.",
        "file:9: text.sources.6.dataset: missing. Expected text.",
        f"file:10: text.sources.7.kind: a list is not one of {SOURCES}. Did you mean 'hub'?",
    ],
    """\
model:
  width: 256
  attention: {kind: linear+softmax}
  mixers:
    - {kind: linear, heads: 3}
    - {kind: window}
    - {kind: softmax, kv_heads: 3}
    - {kind: softmax, heads: 8}
""": [
        "file:5: model.mixers.0.heads: 3 heads do not divide a width of 256. "
        "Use a divisor, or give model.mixers.0.head_dim.",
        "file:6: model.mixers.1.kind: no layer is of kind window. Choose from linear, softmax.",
        "file:7: model.mixers.2.kv_heads: 3 do not divide 4 heads. Use a divisor of model.mixers.2.heads.",
        "file:8: model.mixers.3.kind: softmax is named twice. Name each kind once.",
    ],
    "training:\n  carry_state: true\n  state_passing: 0.5\nmodel:\n  width: 250\n  heads: 4\n": [
        f"file:3: training.{BOTH_STATES}",
        f"file:6: {INDIVISIBLE}",
    ],
    "text: {sequence_length: 2q}\ntraining: {tokens: 0m, segment: 1}\n": [
        f"file:1: text.sequence_length: {UNITS}, at least 8, got '2q'.",
        f"file:2: training.tokens: {UNITS}, above 0, or null, got '0m'.",
        f"file:2: training.segment: {UNITS}, at least 16, or null, got 1.",
    ],
}


@pytest.mark.parametrize("text", SEVERAL)
def test_all_mistakes_are_reported_in_order_of_lines(complaints: Complaints, text: str) -> None:
    assert complaints(text) == SEVERAL[text]


def test_mistakes_of_overrides_come_last(complaints: Complaints) -> None:
    sources, inside = "text.sources=[{kind: fils}]", "training={steps: 1, steps: 2, compile: !x 3}"
    overrides = ["training.stpes=20", sources, "model.attention.kind=linaer", "steps 20", "seed=[1"]
    assert complaints("nmae: x\n", *overrides) == [
        "file:1: nmae: unknown key. Did you mean 'name'?",
        "training.stpes=20: unknown key. Did you mean 'steps'?",
        f"{sources}: text.sources.0.kind: 'fils' is not one of {SOURCES}. Did you mean 'files'?",
        f"model.attention.kind=linaer: 'linaer' is not one of {KINDS}. Did you mean 'linear'?",
        "steps 20: expected key.path=value, such as training.steps=20.",
        "seed=[1: broken YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'.",
    ]
    assert complaints("seed: 1\n", inside) == [
        f"{inside}: training.steps: {TWICE}",
        f"{inside}: training.compile: a recipe holds plain values only. Remove the tag !x.",
    ]


ONE: list[tuple[str, ...]] = [
    (
        "model:\n  attention: {kind: linear+softmax}\n  mixers: [{kind: softmax, heads: 6, head_dim: 5}]\n",
        "file:3: model.mixers.0.head_dim: rotary positions need queries of an even size, not 5. Use an even size.",
    ),
    (
        "training: {weigh: 2}",
        f"file:1: training.weigh: {UNKNOWN}. Nearest here: weight_decay, epochs, teacher; {LISTED}",
    ),
    (f"seed: {'x' * 500}", f"file:1: seed: {SEED}, got '{'x' * 55} ...."),
    ("", EMPTY),
    ("# nothing\n", EMPTY),
    ("- a\n", "file:1: a recipe is made of sections, such as training: {steps: ...}."),
    ("a: 1\nb: [\n", f"file:3: broken YAML: {FLOW}, expected the node content, but found '<stream end>'."),
    ("seed: 1", f"model.width=250: {INDIVISIBLE}", "model.width=250"),
    ("model:\n  heads: 4\n", f"file:2: {INDIVISIBLE}", "model.width=250"),
    ("seed: 1", f"model.width=250: {INDIVISIBLE}", "model={}", "model.width=250"),
    ("seed: 1", "model.dropout=often: expected a number, at least 0, below 1, got 'often'.", "model.dropout=often"),
    ("seed: 1", f"model={{dropuot: 1}}: model.dropuot: {UNKNOWN}. Did you mean 'dropout'?", "model={dropuot: 1}"),
    ("seed: 1\nseed: 2\n", f"file:2: seed: {TWICE}", "model.width=64"),
    ("text: {rows: windows}\ntext:\n", f"file:2: text: {TWICE}", "text.sequence_length=64"),  # a part of it is set
    # although text.tokenizer.path exists
    (FILES.format("path"), f"file:2: text.sources.0.path: {UNKNOWN}. Did you mean 'paths'?"),
    (
        FILES.format("dataset"),
        f"file:2: text.sources.0.dataset: {UNKNOWN}. {OF_HUB}",
    ),
    *(
        (
            f"model: {{attention: {{kind: {kind}}}}}\ntraining:\n  {key}: {value}\n",
            f"file:3: training.{key}: {GROWS}...",
        )
        for kind in ("softmax", "[linear, softmax]")
        for key, value in (("segment", 64), ("carry_state", "true"))
    ),
    (
        "model: {attention: {favor: {resample_every: 5}}}\ntraining:\n  steps: 1\n  carry_state: true\n",
        "file:4: training.carry_state: states become invalid when random features are resampled...",
    ),
    (
        "model:\n  layers: 4\n  attention: {kind: [linear, ngram]}\n  downsample: {layers: 2}\n",
        "file:3: model.attention.kind: ngram reads token ids, but layer 2 is downsampled and has...",
    ),
    *(
        (f"model:\n  attention: {attention}\n", f"file:2: model.attention.{why}...")
        for attention, why in (
            ("{kind: delta, decay: channel}", "decay: delta has one decay for each head"),
            ("{kind: 3linear+delta, decay: channel}", "decay: delta has one decay for each head"),
            ("{feature_map: taylor, decay: channel}", "decay: features of taylor may be negative"),
            (
                "{kind: [window, linear], feature_map: cosine, decay: channel}",
                "decay: features of cosine may be negative",
            ),
            ("{kind: 3linear+full}", "kind: full also looks at the future"),
        )
    ),
]
"""A recipe, what is told of it, of which ... is the rest, and overrides."""


@pytest.mark.parametrize("case", ONE)
def test_one_mistake_is_told_at_its_place(complaints: Complaints, case: tuple[str, ...]) -> None:
    text, told, *overrides = case
    (mistake,) = complaints(text, *overrides)
    assert mistake == told or (told.endswith("...") and mistake.startswith(told.removesuffix("...")))


def test_other_encoding_is_refused(complaints: Complaints) -> None:
    assert complaints(b"a: 1\nb: caf\xe9\n") == ["file:2: not UTF-8. Save the file in that encoding."]


@pytest.mark.parametrize(
    ("downsample", "layers", "end"),
    [
        ("{layers: 3}", 3, "file:3: model.downsample.layers: 3 of 3 layers leaves none at full length. Give 1 to 2."),
        ("{}", 2, "leaves none downsampled. Give 1 to 1."),
        ("{}", 1, "one layer has no middle. Leave downsample out."),
        ("{factor: 3}", 3, "1024 is not a multiple of model.downsample.factor, 3. Use 1026."),
        ("{kind: men}", 3, "file:3: model.downsample.kind: 'men' is not one of mean, max, conv. Did you mean 'mean'?"),
        (
            "{layers: 9}\n  attention: {kind: [linear, ngram]}",
            4,
            "9 of 4 layers leaves none at full length. Give 1 to 3.",
        ),
    ],
)
def test_blocks_must_fit_layers_and_sequence(complaints: Complaints, downsample: str, layers: int, end: str) -> None:
    (mistake,) = complaints(f"model:\n  layers: 3\n  downsample: {downsample}\n{ENOUGH}", f"model.layers={layers}")
    assert mistake.endswith(end)


def test_what_goes_together_is_loaded(loaded: Loaded) -> None:
    for option in ("segment: 64", "carry_state: true"):
        loaded(f"model: {{attention: {{kind: [linear, window]}}}}\ntraining: {{steps: 1, {option}}}\n")
    loaded("model: {attention: {kind: window, feature_map: cosine, decay: channel}}\n" + ENOUGH)  # of no use there
    ngram_at_both_ends = "{layers: 4, attention: {kind: [ngram, linear, linear, ngram]}, downsample: {layers: 2}}"
    loaded(f"model: {ngram_at_both_ends}\n{ENOUGH}")


def test_later_override_replaces_a_mistake(loaded: Loaded) -> None:
    downsampled = "model:\n  layers: 3\n  downsample: {layers: 3}\n" + ENOUGH
    assert loaded(downsampled, "model.downsample=null").model.downsample is None
    assert loaded("seed: 1\nseed: 2\n" + ENOUGH, "seed=3").seed == 3
    assert loaded(ENOUGH, "training={steps: 1, steps: 2, compile: !x 3}", "training={steps: 3}").training.steps == 3


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        ("linaer", f"kind: 'linaer' is not one of {KINDS}. Did you mean 'linear'?"),
        ("3", f"kind: 3 is not one of {KINDS}."),
        ("[linear, sofmax]", f"kind.1: 'sofmax' is not one of {KINDS}. Did you mean 'softmax'?"),
        ("3linear+sofmax", f"kind: 'sofmax' is not one of {KINDS}. Did you mean 'softmax'?"),
        ("3linear++softmax", f"kind: '3linear++softmax' is not one of {KINDS}. Did you mean 'softmax'?"),
        ("12345linear", f"kind: '12345linear' is not one of {KINDS}. Did you mean 'linear'?"),
        (r'"\ud800"', rf"kind: '\ud800' is not one of {KINDS}."),
        ("[2linear]", f"kind.0: '2linear' is not one of {KINDS}. Did you mean 'linear'?"),
        ("[]", f"kind: expected a list of 1 or more, each one of {KINDS}, got an empty list."),
    ],
)
def test_unknown_kind_gives_one_message(complaints: Complaints, kind: str, complaint: str) -> None:
    found = complaints(f"{ENOUGH}model:\n  attention:\n    kind: {kind}\n")
    assert found == [f"file:4: model.attention.{complaint}"]


def test_counts_of_tokens_may_have_units(loaded: Loaded) -> None:
    found = loaded("text: {sequence_length: 12k}\ntraining: {tokens: 1m, segment: 1K, validation_tokens: 100}\n")
    assert (found.text.sequence_length, found.training.tokens, found.training.segment) == (12_288, 1 << 20, 1024)


@pytest.mark.parametrize("text", ["seed: 1\n", "training: {batch_size: 2}\n", "training: {steps: null}\n"])
def test_recipe_without_an_end_trains_for_an_hour(loaded: Loaded, text: str) -> None:
    assert loaded(text).training.minutes == 60
    assert loaded(text, "training.tokens=1m").training.minutes is None


def test_pattern_in_one_word_is_a_list(loaded: Loaded) -> None:
    pattern = "model: {layers: 5, attention: {kind: 2linear+softmax}}\n" + ENOUGH
    chosen = loaded(pattern).model
    assert chosen.attention.kind == ["linear", "linear", "softmax"]
    assert chosen.kinds == ["linear", "linear", "softmax", "linear", "linear"]
    for word, kind in (("window", "window"), ("1window", "window"), ("2window", ["window", "window"])):
        assert loaded(pattern, f"model.attention.kind={word}").model.attention.kind == kind


KEYS = [option.key for option in reference(recipe_class()) if "." in option.key and ".N." not in option.key]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(key=st.sampled_from(KEYS), letter=st.sampled_from("qxz"), place=st.integers(0, 30), blank=st.integers(0, 3))
def test_misspelt_key_is_at_its_line(complaints: Complaints, key: str, letter: str, place: int, blank: int) -> None:
    *sections, name = key.split(".")
    misspelt = name[:place] + letter + name[place:]
    lines = ["seed: 1"] + [""] * blank
    lines += [f"{'  ' * depth}{section}:" for depth, section in enumerate(sections)]
    lines += [f"{'  ' * len(sections)}{misspelt}: 1"]
    found = complaints("\n".join(lines), "training.steps=1")
    place_in_words = f"file:{len(lines)}: {'.'.join([*sections, misspelt])}"
    assert found == [f"{place_in_words}: unknown key. Did you mean '{name}'?"]


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("steps=100", "Did you mean 'training.steps'?"),
        ("model.learning-rate=1", "Did you mean 'training.learning_rate'?"),
        ("width=64", "Did you mean 'model.width'?"),
        ("text.column=x", "Did you mean 'text.sources.0.column'?"),
        ("training.stepz=1", "Did you mean 'steps'?"),
        ("text.sources.0.path=x.txt", "Did you mean 'paths'?"),
        ("training.lr=0.1", "Did you mean 'training.learning_rate'?"),
        ("training.max_steps=3", "Did you mean 'training.steps'?"),
        ("text.sources.0.dataset=x", OF_HUB),
        ("model.block_size=1k", "Did you mean 'text.sequence_length' or 'conversion.sequence_length'?"),
    ],
)
def test_unknown_key_names_the_same_key_elsewhere(override: str, hint: str) -> None:
    with pytest.raises(RecipeError) as error:
        load("book", [override])
    assert str(error.value) == f"{override}: unknown key. {hint}"


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("text.sources.paths=my-book.txt", "got a section. Write 'text.sources.0.paths=my-book.txt'."),
        ("text.sources=my-book.txt", "got 'my-book.txt'. Write 'text.sources.0.paths=my-book.txt'."),
        ("text.sources=[my-book.txt]", "got 'my-book.txt'. Write 'text.sources.0.paths=my-book.txt'."),
        ("text.sources=hub", "got 'hub'. Write 'text.sources.0.kind=hub'."),
        ("model.mixers=softmax", "got 'softmax'. Write 'model.mixers.0.kind=softmax'."),
        ("model.attention=linear", "got 'linear'. Write 'model.attention.kind=linear'."),
        ("text.sources={kind: files}", "got a section."),
        ("text.sources={}", "got a section."),
        ("model.mixers={softmax: {heads: 8}}", "got a section. Write [{kind: softmax, ...}]."),
        ("text.sources={files: {paths: a.txt}}", "got a section. Write [{kind: files, ...}]."),
    ],
)
def test_wrong_level_names_the_right_override(override: str, remedy: str) -> None:
    with pytest.raises(RecipeError) as error:
        load("book", [override])
    (message,) = error.value.mistakes
    assert message.startswith(override) and message.endswith(remedy)


def test_override_adds_a_source_of_files() -> None:
    first = load("quickstart", ["text.sources.0.paths=a.txt"])  # whose file has no sources
    assert [source.kind for source in first.text.sources] == ["files"]
    second = load("book", ["text.sources.1.kind=python-stdlib", "text.sources.2.paths=a.txt"])
    assert [source.kind for source in second.text.sources] == ["files", "python-stdlib", "files"]


def test_mistakes_of_a_dict_are_named_by_key() -> None:
    sections = {
        "nmae": "x",
        "text": {"sources": [{"kind": "files", "paths": ["a.txt"]}]},
        "model": {"widht": 128, "heads": -1},
        "training": {"steps": "soon"},
    }
    with pytest.raises(RecipeError) as caught:
        Recipe.load(sections, {"model.layers": 2.5, "training.compile": "yes", "text.sources.2.weight": 1, "a..b": 2})
    assert sorted(caught.value.mistakes[:4]) == [
        "model.heads: expected a whole number, above 0, got -1.",
        "model.widht: unknown key. Did you mean 'width'?",
        "nmae: unknown key. Did you mean 'name'?",
        "training.steps: expected a whole number, above 0, or null, got 'soon'.",
    ]
    assert caught.value.mistakes[4:] == [
        "model.layers=2.5: expected a whole number, above 0, at most 10000, got 2.5.",
        "training.compile='yes': expected true or false, got 'yes'.",
        "text.sources.2.weight=1: text.sources has no entry 2 here. Give the whole list: 'text.sources=[...]'",
        "a..b=2: expected a key.path, such as training.steps.",
    ]
    with pytest.raises(RecipeError, match=r"^model\.3: unknown key\."):
        Recipe.load({"model": {3: 1}})


@pytest.mark.parametrize(
    ("make", "mistakes"),
    [
        (
            lambda: Training(steps=-1, presicion="32", deepspeed={"stage": 7}, compile="yes"),  # type: ignore[call-arg, arg-type]
            [
                "compile: expected true or false, got 'yes'.",
                "deepspeed.stage: 7 is not one of 1, 2, 3.",
                "presicion: unknown key. Did you mean 'precision'?",
                "steps: expected a whole number, above 0, or null, got -1.",
            ],
        ),
        (lambda: Training(carry_state=True, state_passing=0.5), [BOTH_STATES]),
        (
            lambda: Training(offload_parameters=True),  # type: ignore[call-arg]
            ["offload_parameters: unknown key. Did you mean 'deepspeed.offload_parameters'?"],
        ),
        (
            lambda: Model(width=30, heads=4),
            ["heads: 4 heads do not divide a width of 30. Use a divisor, or give model.head_dim."],
        ),
        (
            lambda: Recipe(model=Model(attention=Attention(kind="full")), training=Training(steps=1)),
            [
                "model.attention.kind: full also looks at the future, so it cannot be causal. Use softmax, which only "
                "looks at the past, or train an encoder by objective: masked."
            ],
        ),
    ],
)
def test_mistakes_of_a_section_are_named_by_key(make: Callable[[], object], mistakes: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        make()
    assert sorted(caught.value.mistakes) == mistakes


SMALL = ["text.sequence_length=64", "training.steps=12", "training.batch_size=4", "model.layers=2"]

COMBINATIONS: dict[str, dict[tuple[str, ...], str]] = {
    "training.sequence_parallel=2": {
        ("training.segment=16",): "segment=16: the parts of a row exchange states layer by layer",
        ("training.compile=true",): "compile=true: the exchange between the parts of a row cannot be compiled",
        ("model.dropout=0.1",): "sequence_parallel=2: not supported with model.dropout",
        ("model.layers=3", "model.downsample.factor=2"): "sequence_parallel=2: not supported with model.downsample",
        ("training.sequence_parallel=3",): "3 devices cannot read a row together with devices: 2 on nodes: 1",
        ("nodes=3", "training.sequence_parallel=4"): "4 devices cannot read a row together with devices: 2 on nodes: 3",
        (
            "devices=128",
            "training.sequence_parallel=128",
        ): "64 tokens cannot be divided into 128 parts. Use fewer devices.",
        ("text.rows=documents", "devices=5", "training.sequence_parallel=5"): "4 tokens cannot be divided into 5 parts",
        ("objective=masked",): "training.sequence_parallel=2: an encoder reads its text at once",
    },
    "training.state_passing=0.5": {
        ("model.attention.kind=softmax",): "training.state_passing",
        ("text.rows=documents",): "training.state_passing",
        ("objective=masked", "model.attention.kind=full"): "training.state_passing",
        ("model.attention.feature_map=favor", "model.attention.favor.resample_every=5"): "training.state_passing",
    },
    "text.short_steps=4": {
        ("text.rows=documents",): "text.short_steps=4: parts of sequences are only read of windows",
        ("training.carry_state=true",): "text.short_steps=4: parts of sequences are only read of windows",
        ("text.sequence_length=62",): "text.short_steps=4: text.sequence_length, 62, is not a multiple of 4",
        ("objective=masked", "model.attention.kind=full"): "text.short_steps=4: short sequences would be",
    },
    "training.quantize=int4": {
        ("objective=masked", "model.attention.kind=full"): "training.quantize=int4: --weights is for decoding",
        ("training.compile=true",): "not supported with compile",
        ("training.teacher=base", "training.teacher_of=layers"): "teacher_of: layers trains parts of the model only",
    },
    "training.teacher=base": {
        ("objective=masked",): "training.teacher",
        ("training.carry_state=true",): "training.teacher",
        ("devices=2", "training.sequence_parallel=2"): "training.teacher=base: a teacher reads whole rows",
    },
    "training.teacher_of=layers": {
        (): "training.teacher: teacher_of: layers needs one",
        ("training.teacher=base", "training.segment=16"): "segment=16: teacher_of: layers compares whole sequences",
        ("training.teacher=base", "training.strategy=deepspeed"): "deepspeed is not supported with teacher_of: layers",
    },
}


@pytest.mark.parametrize(
    ("option", "others"), [(option, others) for option in COMBINATIONS for others in COMBINATIONS[option]]
)
def test_excluded_combination_is_refused(complaints: Complaints, option: str, others: tuple[str, ...]) -> None:
    found = complaints(f"devices: {2 if 'parallel' in option else 1}\n", *SMALL, option, *others)
    assert any(COMBINATIONS[option][others] in mistake for mistake in found), found
