"""`lmlong eval` as its user meets it."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lmlong.cli.evaluate import eval_
from lmlong.errors import UsageError
from lmlong.evaluation.perplexity import PerplexityOptions, measure_perplexity, validation_text
from lmlong.evaluation.perplexity_report import table
from lmlong.inference.loading import load


def evaluated(*words: object) -> Result:
    done = CliRunner().invoke(eval_, [str(word) for word in (*words, "--device", "cpu")], catch_exceptions=False)
    assert done.exit_code == 0
    return done


FEW = ("--min-documents", 1)


def without_speed(printed: str) -> str:
    return re.sub(r"tokens read in .* at most", "", printed)


def test_the_table_is_all_of_standard_output(run: Path) -> None:
    done = evaluated(run, "--lengths", "32,64,4k", *FEW)
    loaded = load(run, "cpu")
    options = PerplexityOptions(lengths=(32, 64), min_documents=1)
    expected = table([measure_perplexity(str(run), loaded, validation_text(loaded), options)])
    assert without_speed(done.stdout) == without_speed(expected + "\n")
    assert done.stderr == f"{run}: fewer than 1 documents reach 4k: left out\n"


def test_json_on_standard_output_stands_alone(run: Path, tmp_path: Path) -> None:
    train = tmp_path / "train.txt"
    options = ("--data", train, "--lengths", "50", "--by", "protocol,context", "--json", "-", *FEW)
    done = evaluated(run, run / "checkpoints" / "latest", *options)
    first, second = json.loads(done.stdout)["runs"]
    assert (first["run"], second["run"]) == (str(run), str(run / "checkpoints" / "latest"))
    assert (first["carried"]["bytes"], first["carried"]["tokens"]) == (train.stat().st_size, train.stat().st_size + 1)
    assert first["context"][0]["nats"] == second["context"][0]["nats"]
    assert first["windows"][0]["reset"]["nats"] > 0
    assert first["position"] == first["state"] == []


def test_options_reach_the_measure(run: Path) -> None:
    done = evaluated(run, "--tokens", 120, "--lengths", "10", "--targets", 15, "--json", "-", *FEW)
    (whole,) = json.loads(done.stdout)["runs"]
    assert (whole["documents"], whole["context"][0]["tokens"]) == (1, 15)
    done = evaluated(run, "--tokens", 120, "--lengths", "10", "--json", "-", "--weights", "bf16", *FEW)
    (rounded,) = json.loads(done.stdout)["runs"]
    assert rounded["parameters"] == whole["parameters"]
    assert rounded["position"][0]["nats"] != whole["position"][0]["nats"]


def test_files_are_written_beside_the_table(run: Path, tmp_path: Path) -> None:
    numbers, plot = tmp_path / "numbers.json", tmp_path / "plot.png"
    done = evaluated(run, "--lengths", "10", "--json", numbers, "--plot", plot, *FEW)
    assert f"{json.loads(numbers.read_text())['runs'][0]['context'][0]['nats_per_token']:.4f}" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lengths", "1k,2x"], "^--lengths: '2x' is no length"),
        (["--by", "contxt"], r"^--by: there is no 'contxt'\. Did you mean 'context'\?$"),
        (["--by", "state", "--plot", "a.png"], "^--plot: draws context, position and protocol"),
        (["--lengths", "64"], "^--lengths: the shortest takes documents of 96 tokens, and 10 of them"),
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
    assert evaluated("runs/tiny/", "--lengths", "10", *FEW).stdout.startswith("tiny\n")
    assert evaluated("tiny", "--lengths", "10", *FEW).stdout.startswith("tiny\n")
