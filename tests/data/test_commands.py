"""`lmlong data`, as typed."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from lmlong.cli.data import data
from lmlong.data.tokenizers import load_tokenizer

from .conftest import sentences

RECIPE = """
text: {sources: [{kind: files, paths: [documents]}], tokenizer: {kind: bytes}, sequence_length: 16}
training: {steps: 1}
"""


@pytest.fixture
def recipe_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("documents").mkdir()
    for number, text in enumerate([*sentences(30), ""]):
        Path("documents", f"{number}.txt").write_text(text, "utf-8")
    Path("books.yaml").write_text(RECIPE)
    return "books.yaml"


def run(command: object, *words: str) -> str:
    result = CliRunner().invoke(command, words, catch_exceptions=False)  # type: ignore[arg-type]
    assert result.exit_code == 0, result.output
    return result.stdout


HELD_OUT = "text.validation.sources=[{kind: files, paths: [documents/0.txt]}]"


def test_prepare_prints_the_folder_that_info_describes_and_both_the_overlap(recipe_file: str) -> None:
    prepared = CliRunner().invoke(data, ["prepare", recipe_file, HELD_OUT])
    described = json.loads(run(data, "info", recipe_file, HELD_OUT, "--json"))
    assert described["folder"] == prepared.stdout.strip()
    tokens = Path(described["folder"], "train-0.tokens")
    assert described["sources"][0]["train"]["tokens"] == tokens.stat().st_size // 2
    assert described["overlap"]["share"] == 1
    overlap = "100.0% of the 50-byte windows of the held-out text occur in the training text\n"
    assert prepared.stderr == overlap and f"\n{overlap}" in run(data, "info", recipe_file, HELD_OUT)


def test_info_is_a_table_of_80_columns(recipe_file: str) -> None:
    table = run(data, "info", recipe_file)
    assert "skipped 1 document, 0 bytes (empty)" in table
    rows = [line for line in table.splitlines() if line.startswith("  ")]
    assert max(map(len, rows)) <= 80
    assert [row.split()[4] for row in rows[3:]] == ["1.00", "1.00"]
    Path("documents", "paper.rar").touch()
    assert "paper.rar" in run(data, "info", recipe_file)


def test_tokenizer_train_and_info(recipe_file: str) -> None:
    options = ["text.tokenizer.kind=sentencepiece", "text.tokenizer.vocabulary=400"]
    assert run(data, "train-tokenizer", recipe_file, *options, "--out", "tokenizer.model") == "tokenizer.model\n"
    found = json.loads(run(data, "tokenizer-info", ".", "--text", "def  ▁é\n", "--json"))
    assert found["vocabulary"] == 400
    assert load_tokenizer("tokenizer.model").decode(found["tokens"]) == "def  ▁é\n"
    assert found["bytes"] == len("def  ▁é\n".encode())
    shown = run(data, "tokenizer-info", "tokenizer.model", "--text", "return")
    assert "vocabulary  400" in shown and load_tokenizer("tokenizer.model").hash in shown


def test_show_prints_what_documents_became(tmp_path: Path, recipe_file: str) -> None:
    folder = tmp_path / "papers"
    folder.mkdir()
    (folder / "a.html").write_text("<p>A dark <b>night</b>.<p>Cold.")
    (folder / "b.fa").write_text(">one\nACGT\n>two\nTT\n")
    (folder / "c.mobi").touch()
    shown = CliRunner().invoke(data, ["show", str(folder)], catch_exceptions=False)
    assert shown.stdout == "A dark night.\n\nCold.\nACGT\nTT\n"
    names = [line.split(":")[0].rpartition("/")[2] for line in shown.stderr.splitlines()]
    assert names == ["c.mobi", "a.html", "b.fa", "b.fa"]
    lines = list(map(json.loads, run(data, "show", str(folder / "b.fa"), "--json").splitlines()))
    assert [(line["header"], line["bytes"], line["text"]) for line in lines] == [("one", 4, "ACGT"), ("two", 2, "TT")]
    (folder / "long.txt").write_text("a" * 1200)
    assert run(data, "show", str(folder / "long.txt")) == "a" * 1000 + "\n"
    few = CliRunner().invoke(data, ["show", recipe_file, "--json"])
    assert len(few.stdout.splitlines()) == 10 and few.stderr.endswith("more documents follow: use --all\n")
    assert len(run(data, "show", recipe_file, "--all", "--json").splitlines()) == 30
