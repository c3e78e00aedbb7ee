"""`lmlong eval` as its user meets it."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lmlong.cli.evaluate import eval_
from lmlong.errors import UsageError
from lmlong.evaluation.perplexity import measure, validation_text
from lmlong.evaluation.tables import table
from lmlong.inference.loading import load


def evaluated(*words: object) -> Result:
    done = CliRunner().invoke(eval_, [str(word) for word in (*words, "--device", "cpu")], catch_exceptions=False)
    assert done.exit_code == 0
    return done


def without_seconds(printed: str) -> list[str]:
    return [line[:-10] if line[:8].strip().isalnum() else line for line in printed.splitlines()]


def test_the_table_is_all_of_standard_output(run: Path) -> None:
    done = evaluated(run, "--lengths", "32,64,4k")
    loaded = load(run, "cpu")
    expected = table([measure(str(run), loaded, validation_text(loaded), [32, 64])])
    assert without_seconds(done.stdout) == without_seconds(expected)
    assert done.stderr == f"{run}: the text is shorter than 4k: left out\n"


def test_json_on_standard_output_stands_alone(run: Path, tmp_path: Path) -> None:
    train = tmp_path / "train.txt"
    done = evaluated(run, run / "checkpoints" / "latest", "--data", train, "--lengths", "50", "--json", "-")
    first, second = json.loads(done.stdout)["runs"]
    assert (first["run"], second["run"]) == (str(run), str(run / "checkpoints" / "latest"))
    (point,) = first["lengths"]
    assert (point["length"], point["bytes"], point["tokens"]) == (50, train.stat().st_size, train.stat().st_size + 1)
    assert point["nats"] == second["lengths"][0]["nats"] == pytest.approx(point["nats_per_token"] * point["tokens"])


def test_tokens_limits_what_is_read(run: Path) -> None:
    done = evaluated(run, "--tokens", 120, "--lengths", "10,119", "--json", "-")
    points = json.loads(done.stdout)["runs"][0]["lengths"]
    assert [(point["length"], point["tokens"]) for point in points] == [(10, 119), (119, 119)]


def test_files_are_written_beside_the_table(run: Path, tmp_path: Path) -> None:
    numbers, plot = tmp_path / "numbers.json", tmp_path / "plot.png"
    done = evaluated(run, "--lengths", "10", "--json", numbers, "--plot", plot)
    assert f"{json.loads(numbers.read_text())['runs'][0]['lengths'][0]['nats_per_token']:.4f}" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lengths", "1k,2x"], "^--lengths: '2x' is no length"),
        (["--plot", "plot.txt"], r"^plot\.txt: cannot be drawn"),
        (["--json", "nowhere/numbers.json"], r"^nowhere/numbers\.json: its folder is missing"),
        (["--plot", "nowhere/plot.png"], r"^nowhere/plot\.png: its folder is missing"),
        (["--data", "nowhere.txt"], r"^nowhere\.txt: no such file"),
    ],
)
def test_a_mistake_is_named(run: Path, words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        evaluated(run, *words)


def test_a_name_under_runs_is_shown_as_that(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parents[1])
    assert evaluated("runs/tiny/", "--lengths", "10").stdout.startswith("tiny\n")
    assert evaluated("tiny", "--lengths", "10").stdout.startswith("tiny\n")
