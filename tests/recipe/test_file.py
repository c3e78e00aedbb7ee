"""Recipes are found, loaded, overridden, merged with that of the run they begin from, and written back."""

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from lmlong.errors import RecipeError
from lmlong.recipe import Attention, Files, Hub, Mixer, Model, PythonStdlib, Recipe, Text, Tokenizer, Training, bounds
from lmlong.recipe.file import dump, dump_without_folders, load
from lmlong.recipe.find import shipped_recipes

from .conftest import Complaints


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(file: Path, text: str) -> str:
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipe_is_dumped_and_loaded(name: str, here: Path) -> None:
    recipe = load(name)
    assert recipe.name == name
    assert load(write(here / "saved.yaml", dump(recipe))) == recipe


words = st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from("\t\n\r\x85 :#'\"-"), max_size=40)


@settings(deadline=None, max_examples=60)
@given(
    path=words.filter(lambda path: not path.startswith("~")),
    column=words | st.sampled_from(["no", "1e-4", "12:30", "null", "~", "<<", "2024-01-01", "0x1F"]),
    dataset=words,
    rate=st.floats(min_value=0, max_value=bounds.FACTOR, exclude_min=True),
    tokens=st.integers(1, bounds.COUNT),
)
def test_any_recipe_is_dumped_and_loaded(
    tmp_path_factory: pytest.TempPathFactory, path: str, column: str, dataset: str, rate: float, tokens: int
) -> None:
    sources = [
        Files(kind="files", paths=["/data/x" + path.replace("/", "") + "x"], column=column),
        Hub(kind="hub", dataset="owner/" + dataset, column=column),
        PythonStdlib(kind="python-stdlib"),
    ]
    recipe = Recipe(text=Text(sources=sources), training=Training(tokens=tokens, learning_rate=rate))
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_bytes(dump(recipe).encode())
    assert load(str(file)) == recipe


def test_recipe_is_named_by_its_file(here: Path) -> None:
    assert load(write(here / "books.yaml", "\ufeffseed: 7\ntraining: {steps: 1}")).name == "books"
    assert load("books.yaml").seed == 7, "after a byte order mark"
    assert load(write(here / "books.yaml", "name: novels\ntraining: {steps: 1}")).name == "novels"
    assert load("books.yaml", ["name=poems"]).name == "poems"


def test_relative_paths_start_at_the_current_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/reader")
    (here / "run").mkdir()
    (here / "local").mkdir()
    text = """\
text:
  sources:
    - {kind: files, paths: [a.txt, "b/**/*.gz", /c, ~/d]}
    - {kind: hub, dataset: local}
    - {kind: hub, dataset: allenai/c4}
  validation: {sources: [{kind: files, paths: [../e.txt]}]}
  tokenizer: {path: t.model}
training: {steps: 1, init_from: run}
"""
    recipe = load(write(here / "books.yaml", text))
    files, local, remote = recipe.text.sources
    (held_out,) = recipe.text.validation.sources
    assert isinstance(files, Files) and isinstance(local, Hub) and isinstance(remote, Hub)
    assert files.paths == [f"{here}/a.txt", f"{here}/b/**/*.gz", "/c", "/home/reader/d"]
    assert (local.dataset, remote.dataset) == (f"{here}/local", "allenai/c4")
    assert isinstance(held_out, Files) and held_out.paths == [f"{here.parent}/e.txt"]
    assert recipe.text.tokenizer.path == f"{here}/t.model"
    assert recipe.training.init_from == f"{here}/run"
    assert load("books.yaml", ["training.init_from=other"]).training.init_from == "other"


def test_overrides_replace_values(here: Path) -> None:
    text = "text: {sources: [{kind: files, paths: [a]}]}\nmodel: {widht: 3, width: abc}\ntraining: {steps: -1}\n"
    overrides = ["training.steps=20", "training.steps=30", "training.learning_rate=1e-4", "training.precision=16"]
    overrides += ["model={}", "model.width=64", "model.attention.kind=[linear, softmax]", "text.sources.0.weight=2"]
    overrides += ["text.validation.sources=[{kind: files, paths: [v.txt]}]"]
    recipe = load(write(here / "books.yaml", text), overrides)
    training, model = recipe.training, recipe.model
    assert (training.steps, training.learning_rate, training.precision) == (30, 1e-4, "16")
    assert (model.width, model.attention.kind) == (64, ["linear", "softmax"])
    assert recipe.text.sources == [Files(kind="files", paths=[str(here / "a")], weight=2)]
    assert recipe.text.validation.sources == [Files(kind="files", paths=[str(here / "v.txt")])]


@pytest.mark.parametrize("paths", ["a.txt", "[a.txt]", "a.txt,b c/*.md", "a.txt, b c/*.md", '["a.txt", "b c/*.md"]'])
def test_paths_need_no_brackets(here: Path, paths: str) -> None:
    """Which zsh takes for a pattern of file names."""
    (source,) = load("book", [f"text.sources.0.paths={paths}"]).text.sources
    assert isinstance(source, Files)
    assert source.paths == [str(here / name) for name in ("a.txt", "b c/*.md")[: 1 + ("b c" in paths)]]


def test_override_leaves_an_alias_alone(here: Path) -> None:
    source = "{kind: files, paths: [a]}"
    text = f"text:\n  sources: [&s {source}]\n  validation: {{sources: [*s]}}\ntraining: {{steps: 1}}\n"
    recipe = load(write(here / "books.yaml", text), ["text.sources.0.weight=2"])
    assert recipe.text.sources[0].weight == 2
    assert recipe.text.validation.sources[0].weight == 1


STEPS = "expected a whole number, above 0, or null"


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("=3", "=3: expected key.path=value, such as training.steps=20."),
        ("a..b=3", "a..b=3: expected key.path=value, such as training.steps=20."),
        ("training.steps.x=3", f"training.steps.x=3: training.steps: {STEPS}, got a section."),
        ("seed=", "seed=: expected a whole number, at least 0, below 4294967296, got nothing."),
    ],
)
def test_unusable_override_is_refused(complaints: Complaints, override: str, complaint: str) -> None:
    assert complaints("training: {steps: 1}\n", override) == [complaint]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("quikstart", "quikstart: no recipe with this name. Did you mean 'quickstart'?"),
        ("zzz", f"zzz: no recipe with this name. Shipped recipes: {', '.join(shipped_recipes())}."),
        ("quickstart.yaml", "quickstart.yaml: no such file. Did you mean 'quickstart'?"),
        ("mine.yml", "mine.yml: no such file. Did you mean 'mine.yaml'?"),
        ("a/zzz", f"a/zzz: no such file. Shipped recipes: {', '.join(shipped_recipes())}."),
        (
            ".",
            ".: is a folder, not a recipe. Name the recipe file in it, or train on its texts: `lmlong train library "
            "text.sources.0.paths=.`.",
        ),
    ],
)
def test_missing_recipe_is_reported(here: Path, name: str, complaint: str) -> None:
    write(here / "mine.yaml", "training: {steps: 1}\n")
    with pytest.raises(RecipeError) as caught:
        load(name)
    assert caught.value.mistakes == [complaint]


@pytest.mark.parametrize(
    "text",
    [b"*** Chapter 1 ***\n", b"Hello: there: again\n", b"One line of text.\n", b"caf\xe9\n", b"x" * (2 << 20), b""],
    ids=["alias", "colons", "words", "latin", "long", "empty"],
)
def test_text_is_not_a_recipe(here: Path, text: bytes) -> None:
    (here / "my book.txt").write_bytes(text)
    with pytest.raises(RecipeError) as error:
        load("my book.txt")
    assert str(error.value) == (
        "my book.txt: not a recipe (.yaml). To train on it: `lmlong train book 'text.sources.0.paths=my book.txt'`."
    )


def test_dict_is_loaded_like_a_file(here: Path) -> None:
    sections = {"name": "books", "text": {"sequence_length": 128}, "training": {"steps": 3, "precision": 32}}
    file = write(here / "books.yaml", "text: {sequence_length: 128}\ntraining: {steps: 3, precision: 32}\n")
    assert Recipe.load(sections) == Recipe.load(file) == load(file)
    assert sections["training"] == {"steps": 3, "precision": 32}, "the dict is as it was"
    assert Recipe.load({"training": {"steps": 3}}).name == "run"


def test_python_overrides_are_those_of_the_command_line(here: Path) -> None:
    words = ["training.steps=7", "text.sources=[{kind: files, paths: [a.txt]}]", "text.sources.0.weight=2.5"]
    values = {
        "training.steps": 7,
        "text.sources": [{"kind": "files", "paths": ["a.txt"]}],
        "text.sources.0.weight": 2.5,
    }
    recipe = Recipe.load("quickstart", values)
    assert recipe == load("quickstart", words)
    assert recipe.text.sources == [Files(kind="files", paths=[str(here / "a.txt")], weight=2.5)]
    assert Recipe.load(Path("quickstart")) == load("quickstart")


def test_dict_may_hold_typed_sections(here: Path) -> None:
    sections = {"text": Text(sequence_length=128, rows="documents"), "training": Training(steps=3, batch_size=2)}
    changed = Recipe.load(sections, {"text.sequence_length": 64, "training.steps": 4})
    assert (changed.text.rows, changed.text.sequence_length) == ("documents", 64)
    assert (changed.training.batch_size, changed.training.steps) == (2, 4)


def test_published_recipe_names_no_folders() -> None:
    paths = ["/home/secret: me/a b.txt", "/secret/#1.txt", "C:\\secret\\c.txt", "~/secret/d*.txt", "../secret/'e'.txt"]
    text = {
        "sources": [{"kind": "files", "paths": paths}, {"kind": "hub", "dataset": "owner/name"}],
        "validation": {"sources": [{"kind": "hub", "dataset": "/secret/set"}]},
        "tokenizer": {"path": "/secret/\x85/t.model"},
    }
    training = {"init_from": "/secret/run", "teacher": "/secret/teacher", "deepspeed": {"config": "/secret/z.json"}}
    chosen = Recipe.model_validate({"text": text, "training": training})
    published = dump_without_folders(chosen)
    assert "secret" not in published and "secret" in dump(chosen)
    values = YAML(typ="safe").load(published)
    shown = [source.get("paths") or source["dataset"] for source in values["text"]["sources"]]
    assert shown == [["a b.txt", "#1.txt", "c.txt", "d*.txt", "'e'.txt"], "owner/name"]
    assert values["text"]["validation"]["sources"][0]["dataset"] == "set"
    assert values["text"]["tokenizer"]["path"] == "t.model"
    assert (values["training"]["init_from"], values["training"]["teacher"]) == ("run", "teacher")


def test_removed_option_is_dropped_at_its_default(here: Path) -> None:
    saved = dump(load("quickstart")).replace("training:\n", "training:\n  keep_predictions: null\n")
    assert load(write(here / "a.yaml", saved)) == load("quickstart")
    other = write(here / "b.yaml", saved.replace("keep_predictions: null", "keep_predictions: 32"))
    assert load(other, as_trained=True) == load("quickstart")
    with pytest.raises(RecipeError, match=r"b.yaml:\d+: training.keep_predictions: no longer an option. The teacher"):
        load(other)


THERE = Recipe(
    text=Text(tokenizer=Tokenizer(kind="bytes")),
    model=Model(width=48, layers=3, heads=3, attention=Attention(kind="softmax"), output_gate=False),
)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "recipe.yaml").write_text(dump(THERE))
    return tmp_path / "runs"


def test_some_kinds_of_the_run_are_replaced(runs: Path) -> None:
    hybrid = Model(
        layers=3,
        attention=Attention(kind=["delta", "softmax"], decay="fixed"),
        mixers=[Mixer(kind="softmax", kv_heads=2), Mixer(kind="delta", convolution=2)],
    )
    (runs / "first" / "recipe.yaml").write_text(dump(THERE.model_copy(update={"model": hybrid})))
    attention = {"kind": {"softmax": "window"}, "window": 9}
    model = load({"training": {"steps": 7, "init_from": "first"}, "model": {"attention": attention}}).model
    assert model.kinds == ["delta", "window", "delta"]
    assert (model.attention.window, model.attention.decay) == (9, "fixed")
    assert [(mixer.kind, mixer.kv_heads, mixer.convolution) for mixer in model.mixers] == [
        ("window", 2, None),
        ("delta", None, 2),
    ]
    assert load({"training": {"steps": 7}, "model": {"attention": attention}}).model.kinds == ["window"] * 6
    for damaged in (b"model: 3", b"model: {attention: 5, mixers: [x, {kind: [1]}]}", b"model: {mixers: 7}"):
        (runs / "first" / "recipe.yaml").write_bytes(damaged)
        with suppress(RecipeError):
            load({"training": {"steps": 7, "init_from": "first"}, "model": {"attention": attention}})


@pytest.mark.parametrize("start", ["first", "runs/first", "{runs}/first"])
def test_model_and_tokenizer_are_those_of_the_run(runs: Path, start: str) -> None:
    recipe = load({"training": {"steps": 7, "init_from": start.format(runs=runs)}, "text": {"sequence_length": 64}})
    assert (recipe.model, recipe.text.tokenizer) == (THERE.model, THERE.text.tokenizer)
    assert (recipe.training.steps, recipe.text.sequence_length) == (7, 64)


def test_recipe_overrides_the_run(runs: Path) -> None:
    file = runs.parent / "own.yaml"
    file.write_text("text: {tokenizer: {vocabulary: 512}}\nmodel: {layers: 2}\ntraining: {init_from: first}\n")
    recipe = load(file, ["model.attention.kind=delta"])
    assert recipe.text.tokenizer == Tokenizer(vocabulary=512)
    assert recipe.model == THERE.model.model_copy(update={"layers": 2, "attention": Attention(kind="delta")})


def test_merged_recipe_is_checked(runs: Path) -> None:
    with pytest.raises(RecipeError, match=r"carry_state.*softmax"):
        load({"training": {"init_from": "first", "carry_state": True}})


def test_recipe_of_a_trained_run_is_not_merged(runs: Path) -> None:
    assert load({"training": {"init_from": "first"}}, as_trained=True).model == Model()


@pytest.mark.parametrize("content", [None, b"", b"- a", b"model: [", b"\xff", b"model: 3\ntext: {tokenizer: 4}"])
def test_run_without_a_recipe_changes_nothing(runs: Path, content: bytes | None) -> None:
    file = runs / "first" / "recipe.yaml"
    file.unlink() if content is None else file.write_bytes(content)
    try:
        assert load({"training": {"init_from": "first"}}).model == Model()
    except RecipeError as error:
        assert "tokenizer" in str(error)


@pytest.mark.parametrize("values", [{"model": 3}, {"text": []}, {"training": {"init_from": 5}}])
def test_other_mistakes_are_reported(runs: Path, values: dict[str, object]) -> None:
    with pytest.raises(RecipeError):
        load({"training": {"init_from": "first"}} | values)
