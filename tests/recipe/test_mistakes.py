"""All mistakes of a recipe are reported at once: one sentence each, at its line or with its override."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmlong.errors import RecipeError
from lmlong.recipe import ATTENTION_KINDS, Attention, Model, Recipe, Training
from lmlong.recipe.file import load, recipe_class
from lmlong.recipe.reference import reference

from .conftest import Complaints

ENOUGH = "training: {steps: 1}\n"
KINDS = ", ".join(ATTENTION_KINDS)


def test_all_mistakes_are_reported_in_order_of_lines(complaints: Complaints) -> None:
    text = """\
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
"""
    assert complaints(text) == [
        "file:1: nmae: unknown key. Did you mean 'name'?",
        "file:3: training.steps: expected a whole number, above 0, or null, got 2000.0. Write 2000.",
        "file:4: training.compile: expected true or false, got 'yes'.",
        "file:6: model.widht: unknown key. Did you mean 'width'?",
        "file:8: model.width: given twice, first on line 7. Keep one of them.",
        "file:8: model.width: expected a whole number, above 0, got nothing.",
        "file:9: model.heads: expected a whole number, above 0, got -1.",
        "file:10: model.mlp_ratio: expected a number, above 0, at most 1024, got inf.",
    ]


def test_blocks_must_fit_layers_and_sequence(complaints: Complaints, file: Path) -> None:
    def told(downsample: str, *overrides: str) -> str:
        (mistake,) = complaints(f"model:\n  layers: 3\n  downsample: {downsample}\n{ENOUGH}", *overrides)
        return mistake

    middle = "file:3: model.downsample.layers: "
    assert told("{layers: 3}") == middle + "3 of 3 layers leaves none at full length. Give 1 to 2."
    assert told("{}", "model.layers=2").endswith("leaves none downsampled. Give 1 to 1.")
    assert told("{}", "model.layers=1").endswith("one layer has no middle. Leave downsample out.")
    assert told("{factor: 3}").endswith("1024 is not a multiple of model.downsample.factor, 3. Use 1026.")
    assert told("{kind: men}") == (
        "file:3: model.downsample.kind: 'men' is not one of mean, max, conv. Did you mean 'mean'?"
    )
    assert load(str(file), ["model.downsample=null"]).model.downsample is None


@pytest.mark.parametrize("option", ["segment: 64", "carry_state: true"])
def test_growing_state_is_not_passed_on(complaints: Complaints, file: Path, option: str) -> None:
    for kind in ("softmax", "[linear, softmax]"):
        text = f"model:\n  attention: {{kind: {kind}}}\ntraining:\n  steps: 1\n  {option}\n"
        (mistake,) = complaints(text)
        assert mistake.startswith(f"file:5: training.{option.split(':')[0]}: the state of softmax attention grows")
    file.write_text(f"model: {{attention: {{kind: [linear, window]}}}}\ntraining: {{steps: 1, {option}}}\n")
    assert load(str(file)).training.steps == 1


def test_carried_states_exclude_resampling(complaints: Complaints) -> None:
    text = "model: {attention: {favor: {resample_every: 5}}}\ntraining:\n  steps: 1\n  carry_state: true\n"
    (mistake,) = complaints(text)
    assert mistake.startswith("file:4: training.carry_state: states become invalid when random features are resampled")


def test_source_is_checked_by_its_kind(complaints: Complaints) -> None:
    text = """\
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
"""
    kinds = "python-stdlib, files, hub"
    assert complaints(text + ENOUGH) == [
        f"file:3: text.sources.0.kind: 'fils' is not one of {kinds}. Did you mean 'files'?",
        f"file:4: text.sources.1.kind: missing. Expected one of {kinds}.",
        "file:5: text.sources.2.paths.0: expected text, got 1. Put it in quotes.",
        "file:5: text.sources.2.files: unknown key. Known here: kind, paths, column, soft_masks, weight.",
        f"file:6: text.sources.3: expected a section of kind {kinds}, got 3.",
        "file:7: text.sources.4.paths: expected one or more file names, such as a.txt,b.txt, got an empty list.",
        "file:8: text.sources.5.paths: expected one or more file names, such as a.txt,b.txt, got a section.",
        "file:9: text.sources.6.dataset: missing. Expected text.",
        f"file:10: text.sources.7.kind: a list is not one of {kinds}. Did you mean 'hub'?",
    ]


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
        (
            "[]",
            f"kind: expected a list of 1 or more, each one of {KINDS}, got an empty list.",
        ),
    ],
)
def test_unknown_kind_gives_one_message(complaints: Complaints, kind: str, complaint: str) -> None:
    found = complaints(f"{ENOUGH}model:\n  attention:\n    kind: {kind}\n")
    assert found == [f"file:4: model.attention.{complaint}"]


def test_mistakes_across_keys_are_at_the_named_key(complaints: Complaints) -> None:
    text = "training:\n  carry_state: true\n  state_passing: 0.5\nmodel:\n  width: 250\n  heads: 4\n"
    assert complaints(text) == [
        "file:3: training.state_passing: with carry_state, no row begins with the state of another text. "
        "Use one of them.",
        "file:6: model.heads: 4 heads do not divide a width of 250. Use a divisor, or give model.head_dim.",
    ]


def test_mistakes_in_mixers_are_at_their_entry(complaints: Complaints) -> None:
    mixers = ["{kind: linear, heads: 3}", "{kind: window}", "{kind: softmax, kv_heads: 3}", "{kind: softmax, heads: 8}"]
    listed = "".join(f"    - {mixer}\n" for mixer in mixers)
    pattern = "  attention: {kind: linear+softmax}\n"
    assert complaints(f"{ENOUGH}model:\n  width: 256\n{pattern}  mixers:\n{listed}") == [
        "file:6: model.mixers.0.heads: 3 heads do not divide a width of 256. "
        "Use a divisor, or give model.mixers.0.head_dim.",
        "file:7: model.mixers.1.kind: no layer is of kind window. Choose from linear, softmax.",
        "file:8: model.mixers.2.kv_heads: 3 do not divide 4 heads. Use a divisor of model.mixers.2.heads.",
        "file:9: model.mixers.3.kind: softmax is named twice. Name each kind once.",
    ]
    odd = "  mixers: [{kind: softmax, heads: 6, head_dim: 5}]\n"
    assert complaints(f"{ENOUGH}model:\n{pattern}{odd}") == [
        "file:4: model.mixers.0.head_dim: rotary positions need queries of an even size, not 5. Use an even size."
    ]


def test_unknown_key_names_the_three_nearest(complaints: Complaints) -> None:
    assert complaints("training: {steps: 1, weigh: 2}\n") == [
        "file:1: training.weigh: unknown key. Nearest here: weight_decay, epochs, teacher; "
        "`lmlong recipe options training` lists all."
    ]


def test_counts_of_tokens_may_have_units(complaints: Complaints, file: Path) -> None:
    file.write_text("text: {sequence_length: 12k}\ntraining: {tokens: 1m, segment: 1K, validation_tokens: 100}\n")
    found = load(str(file))
    assert (found.text.sequence_length, found.training.tokens, found.training.segment) == (12_288, 1 << 20, 1024)
    wrong = "text: {sequence_length: 2q}\ntraining: {tokens: 0m, segment: 1}\n"
    assert [line.partition(": ")[2] for line in complaints(wrong)] == [
        "text.sequence_length: expected a whole number (or such as 4k, 1m), at least 8, got '2q'.",
        "training.tokens: expected a whole number (or such as 4k, 1m), above 0, or null, got '0m'.",
        "training.segment: expected a whole number (or such as 4k, 1m), at least 16, or null, got 1.",
    ]


@pytest.mark.parametrize("text", ["seed: 1\n", "training: {batch_size: 2}\n", "training: {steps: null}\n"])
def test_recipe_without_an_end_trains_for_an_hour(file: Path, text: str) -> None:
    file.write_text(text)
    assert load(str(file)).training.minutes == 60
    assert load(str(file), overrides=["training.tokens=1m"]).training.minutes is None


def test_long_values_are_shortened(complaints: Complaints) -> None:
    (found,) = complaints(f"{ENOUGH}seed: {'x' * 500}\n")
    assert found == f"file:2: seed: expected a whole number, at least 0, below 4294967296, got '{'x' * 55} ...."


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "file: the file is empty. A recipe needs at least training: {steps: ...}."),
        (b"# nothing\n", "file: the file is empty. A recipe needs at least training: {steps: ...}."),
        (b"- a\n", "file:1: a recipe is made of sections, such as training: {steps: ...}."),
        (b"a: 1\nb: caf\xe9\n", "file:2: not UTF-8. Save the file in that encoding."),
        (
            b"a: 1\nb: [\n",
            "file:3: broken YAML: while parsing a flow node, expected the node content, but found '<stream end>'.",
        ),
    ],
)
def test_invalid_file_is_refused(complaints: Complaints, content: bytes, complaint: str) -> None:
    assert complaints(content) == [complaint]


def test_mistakes_of_overrides_come_last(complaints: Complaints) -> None:
    overrides = [
        "training.stpes=20",
        "text.sources=[{kind: fils}]",
        "model.attention.kind=linaer",
        "steps 20",
        "seed=[1",
    ]
    assert complaints(f"{ENOUGH}nmae: x\n", *overrides) == [
        "file:2: nmae: unknown key. Did you mean 'name'?",
        "training.stpes=20: unknown key. Did you mean 'steps'?",
        "text.sources=[{kind: fils}]: text.sources.0.kind: 'fils' is not one of python-stdlib, files, hub."
        " Did you mean 'files'?",
        f"model.attention.kind=linaer: 'linaer' is not one of {KINDS}. Did you mean 'linear'?",
        "steps 20: expected key.path=value, such as training.steps=20.",
        "seed=[1: broken YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'.",
    ]


def test_mistake_across_keys_names_the_override(complaints: Complaints) -> None:
    assert complaints(ENOUGH, "model.width=250") == [
        "model.width=250: model.heads: 4 heads do not divide a width of 250. Use a divisor, or give model.head_dim."
    ]
    assert complaints(f"{ENOUGH}model:\n  heads: 4\n", "model.width=250") == [
        "file:3: model.heads: 4 heads do not divide a width of 250. Use a divisor, or give model.head_dim."
    ]
    assert complaints(ENOUGH, "model={}", "model.width=250") == [
        "model.width=250: model.heads: 4 heads do not divide a width of 250. Use a divisor, or give model.head_dim."
    ]


def test_wrong_value_names_its_override(complaints: Complaints) -> None:
    assert complaints("seed: 1\n", "model.dropout=often", "model.width=64") == [
        "model.dropout=often: expected a number, at least 0, below 1, got 'often'."
    ]
    assert complaints("seed: 1\n", "model={dropuot: 0.1}", "model.width=64") == [
        "model={dropuot: 0.1}: model.dropuot: unknown key. Did you mean 'dropout'?"
    ]


def test_override_settles_equal_keys(complaints: Complaints, file: Path) -> None:
    text = "seed: 1\nseed: 2\n" + ENOUGH
    assert complaints(text, "model.width=64") == ["file:2: seed: given twice, first on line 1. Keep one of them."]
    assert load(str(file), ["seed=3"]).seed == 3
    text = "text: {rows: windows}\ntext:\n" + ENOUGH
    found = complaints(text, "text.sequence_length=64")
    assert found == ["file:2: text: given twice, first on line 1. Keep one of them."], "a part of the section is set"


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


def test_mistakes_of_a_dict_are_named_by_key() -> None:
    sections = {
        "nmae": "x",
        "text": {"sources": [{"kind": "files", "paths": ["a.txt"]}]},
        "model": {"widht": 128, "heads": -1},
        "training": {"steps": "soon"},
    }
    with pytest.raises(RecipeError) as caught:
        Recipe.load(sections, {"model.layers": 2.5, "training.compile": "yes", "text.sources.1.weight": 1, "a..b": 2})
    assert sorted(caught.value.mistakes[:4]) == [
        "model.heads: expected a whole number, above 0, got -1.",
        "model.widht: unknown key. Did you mean 'width'?",
        "nmae: unknown key. Did you mean 'name'?",
        "training.steps: expected a whole number, above 0, or null, got 'soon'.",
    ]
    assert caught.value.mistakes[4:] == [
        "model.layers=2.5: expected a whole number, above 0, at most 10000, got 2.5.",
        "training.compile='yes': expected true or false, got 'yes'.",
        "text.sources.1.weight=1: text.sources has no entry 1 here. Give the whole list: 'text.sources=[...]'",
        "a..b=2: expected a key.path, such as training.steps.",
    ]


def test_mistakes_of_a_section_are_named_by_key() -> None:
    with pytest.raises(RecipeError) as caught:
        Training(steps=-1, presicion="32", deepspeed={"stage": 7}, compile="yes")  # type: ignore[call-arg, arg-type]
    assert sorted(caught.value.mistakes) == [
        "compile: expected true or false, got 'yes'.",
        "deepspeed.stage: 7 is not one of 1, 2, 3.",
        "presicion: unknown key. Did you mean 'precision'?",
        "steps: expected a whole number, above 0, or null, got -1.",
    ]
    for wrong, message in (
        (
            lambda: Training(carry_state=True, state_passing=0.5),
            "state_passing: with carry_state, no row begins with the state of another text. Use one of them.",
        ),
        (
            lambda: Model(width=30, heads=4),
            "heads: 4 heads do not divide a width of 30. Use a divisor, or give model.head_dim.",
        ),
        (
            lambda: Recipe(model=Model(attention=Attention(kind="full")), training=Training(steps=1)),
            "model.attention.kind: full also looks at the future, so it cannot be causal. Use softmax, which only "
            "looks at the past, or train an encoder by objective: masked.",
        ),
    ):
        with pytest.raises(RecipeError) as caught:
            wrong()
        assert caught.value.mistakes == [message]


def test_ngram_layer_cannot_be_downsampled(complaints: Complaints, file: Path) -> None:
    def told(kind: str, layers: int) -> list[str]:
        middle = f"model:\n  layers: 4\n  attention: {{kind: {kind}}}\n  downsample: {{layers: {layers}}}\n"
        return complaints(middle + ENOUGH)

    (mistake,) = told("[linear, ngram]", 2)
    assert mistake.startswith("file:3: model.attention.kind: ngram reads token ids, but layer 2 is downsampled and has")
    (mistake,) = told("[linear, ngram]", 9)
    assert "9 of 4 layers leaves none" in mistake
    file.write_text(
        "model: {layers: 4, attention: {kind: [ngram, linear, linear, ngram]}, downsample: {layers: 2}}\n" + ENOUGH
    )
    load(str(file), [])


@pytest.mark.parametrize(
    ("attention", "key", "why"),
    [
        ("{kind: delta, decay: channel}", "decay", "delta has one decay for each head"),
        ("{kind: 3linear+delta, decay: channel}", "decay", "delta has one decay for each head"),
        ("{feature_map: taylor, decay: channel}", "decay", "features of taylor may be negative"),
        (
            "{kind: [window, linear], feature_map: cosine, decay: channel}",
            "decay",
            "features of cosine may be negative",
        ),
    ],
)
def test_decay_by_channel_is_refused(tmp_path: Path, attention: str, key: str, why: str) -> None:
    file = tmp_path / "channel.yaml"
    file.write_text(f"model: {{attention: {attention}}}\n" + ENOUGH)
    with pytest.raises(RecipeError, match=f"model.attention.{key}: {why}"):
        load(file)
    file.write_text("model: {attention: {kind: window, feature_map: cosine, decay: channel}}\n" + ENOUGH)
    load(file)  # of no use there


def test_pattern_in_one_word_is_a_list(tmp_path: Path) -> None:
    file = tmp_path / "pattern.yaml"
    file.write_text("model: {attention: {kind: 3linear+full}}\n" + ENOUGH)
    with pytest.raises(RecipeError, match=r"model\.attention\.kind: full also looks at the future"):
        load(file)
    file.write_text("model: {layers: 5, attention: {kind: 2linear+softmax}}\n" + ENOUGH)
    chosen = load(file)
    assert chosen.model.attention.kind == ["linear", "linear", "softmax"]
    assert chosen.model.kinds == ["linear", "linear", "softmax", "linear", "linear"]
    assert load(file, ["model.attention.kind=window"]).model.attention.kind == "window"
    assert load(file, ["model.attention.kind=1window"]).model.attention.kind == "window"
    assert load(file, ["model.attention.kind=2window"]).model.attention.kind == ["window", "window"]


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("steps=100", "Did you mean 'training.steps'?"),
        ("model.learning-rate=1", "Did you mean 'training.learning_rate'?"),
        ("width=64", "Did you mean 'model.width'?"),
        ("text.column=x", "Did you mean 'text.sources.0.column'?"),
        ("training.stepz=1", "Did you mean 'steps'?"),
    ],
)
def test_unknown_key_names_the_same_key_elsewhere(override: str, hint: str) -> None:
    with pytest.raises(RecipeError) as error:
        load("quickstart", [override])
    assert str(error.value) == f"{override}: unknown key. {hint}"


def test_key_of_the_same_section_is_nearest(complaints: Complaints) -> None:
    """text.tokenizer.path exists."""
    (found,) = complaints("text:\n  sources:\n    - {kind: files, paths: [a.txt], path: x.txt}\n")
    assert found == "file:3: text.sources.0.path: unknown key. Did you mean 'paths'?"
    with pytest.raises(RecipeError) as error:
        load("book", ["text.sources.0.path=x.txt"])
    assert str(error.value) == "text.sources.0.path=x.txt: unknown key. Did you mean 'paths'?"


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("text.sources.paths=my-book.txt", "got a section. Write 'text.sources.0.paths=my-book.txt'."),
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


def test_mistakes_inside_an_override_are_all_reported(complaints: Complaints, file: Path) -> None:
    override = "training={steps: 1, steps: 2, compile: !x 3}"
    assert complaints(ENOUGH, override) == [
        f"{override}: training.steps: given twice, first on line 1. Keep one of them.",
        f"{override}: training.compile: a recipe holds plain values only. Remove the tag !x.",
    ]
    assert load(str(file), [override, "training={steps: 3}"]).training.steps == 3, "replaced by a later override"


def test_key_of_another_kind_of_section_is_no_hint(complaints: Complaints) -> None:
    (found,) = complaints("text:\n  sources:\n    - {kind: files, paths: [a.txt], dataset: x}\n")
    assert found == (
        "file:3: text.sources.0.dataset: unknown key. Known here: kind, paths, column, soft_masks, weight."
    )


def test_dict_with_a_key_that_is_no_text_names_it() -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.load({"model": {3: 1}})
    assert caught.value.mistakes[0].startswith("model.3: unknown key.")


def test_section_names_an_option_of_an_inner_section() -> None:
    with pytest.raises(RecipeError) as caught:
        Training(offload_parameters=True)  # type: ignore[call-arg]
    assert caught.value.mistakes == ["offload_parameters: unknown key. Did you mean 'deepspeed.offload_parameters'?"]
