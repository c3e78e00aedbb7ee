"""A recipe that begins from another run leaves out what is to be as it is there."""

from pathlib import Path

import pytest

from lmlong.errors import RecipeError
from lmlong.recipe import Attention, Model, Recipe, Text, Tokenizer
from lmlong.recipe.file import dump, load

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
