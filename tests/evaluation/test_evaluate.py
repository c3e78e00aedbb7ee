"""`lmlong eval` and `lmlong.evaluate` as their users meet them."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import lmlong
from lmlong.cli.evaluate import OPTIONS, eval_
from lmlong.errors import UsageError
from lmlong.evaluation.perplexity_report import perplexity_report
from lmlong.inference.loading import TrainedLanguageModel, load
from lmlong.model import device as device_module

from .conftest import write_run
from .reports import values


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
    report = lmlong.evaluate(
        loaded, name=str(run), views=("context", "position"), lengths=(32, 64, 4096), min_documents=1
    )
    expected = perplexity_report([report]).text()
    assert without_speed(done.stdout) == without_speed(expected + "\n")
    assert "  left out: 4k, which too few documents reach\n" in done.stdout


def test_json_on_standard_output_stands_alone(run: Path, tmp_path: Path) -> None:
    train = tmp_path / "train.txt"
    options = ("--data", train, "--lengths", "50", "--by", "context,position", "--json", "-", *FEW)
    done = evaluated(run, run / "checkpoints" / "latest", *options)
    first, second = json.loads(done.stdout)["runs"]
    assert (first["run"], second["run"]) == (str(run), str(run / "checkpoints" / "latest"))
    assert (first["carried"]["bytes"], first["carried"]["tokens"]) == (train.stat().st_size, train.stat().st_size + 1)
    assert first["context"][0]["nats"] == second["context"][0]["nats"]
    assert first["position"] and first["state"] == []


def test_learning_is_measured_beside_the_model_alone(run: Path, tmp_path: Path) -> None:
    views = ("--by", "context,position,state")
    options = ("--lengths", "32,64", *views, "--json", "-", "--data", tmp_path / "validation-0.txt", *FEW)
    printed = [json.loads(evaluated(*words, *options).stdout)["runs"] for words in ((run, "--learn"), (run,))]
    (plain, learning), (alone,) = map(without_times, printed)
    assert alone == plain
    assert (plain["run"], learning["run"]) == (str(run), f"{run}, learning")
    for view in ("context", "position"):
        assert plain[view][-1]["nats"] > learning[view][-1]["nats"]
    assert plain["state"] == learning["state"] != []  # only the output layer learns
    assert plain["state_bytes"] < learning["state_bytes"]


def test_a_run_whose_recipe_says_so_learns_by_default(loaded: TrainedLanguageModel, tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "learns", loaded.recipe.model_copy(update={"learn": True}), 7)
    assert [load(run, "cpu", learn=learn).learn for learn in (None, True, False)] == [True, True, False]
    for words, names in (((), [str(run), f"{run}, learning"]), (("--no-learn",), [str(run)])):
        printed = evaluated(run, *words, "--lengths", "32", "--json", "-", *FEW).stdout
        assert [each["run"] for each in json.loads(printed)["runs"]] == names


def test_options_reach_the_measure(run: Path) -> None:
    done = evaluated(run, "--tokens", 120, "--lengths", "10", "--targets", 15, "--json", "-", *FEW)
    (whole,) = json.loads(done.stdout)["runs"]
    assert (whole["documents"], whole["context"][0]["tokens"]) == (1, 15)
    for option in ("--weights", "--precision"):
        done = evaluated(run, "--tokens", 120, "--lengths", "10", "--json", "-", option, "bf16", *FEW)
        (rounded,) = json.loads(done.stdout)["runs"]
        assert rounded["parameters"] == whole["parameters"]
        assert rounded["position"][0]["nats"] != whole["position"][0]["nats"]
    assert (whole["precision"], rounded["precision"]) == ("32", "bf16")


def test_a_mistake_is_named(run: Path) -> None:
    for words, message in [
        (["--lengths", "1k,2x"], "^--lengths: '2x' is not a length"),
        (["--by", "contxt"], r"^--by: there is no 'contxt'\. Did you mean 'context'\?$"),
        (["--by", "state", "--plot", "a.png"], "^--plot: belongs to --by context, .* not to --by state. Leave it out"),
        (["--probes", "copy"], "^--probes: belongs to --by recall, not to --by context, --by position"),
        (["--by", "recall", "--learn"], "^--learn: belongs to --by context, --by position, --by state, not to --by re"),
        (["--by", "recall,spectrum"], "^--by: recall is measured alone"),
        (["--by", "state", "--tasks", "arc_easy"], "^--by, --tasks: mutually exclusive"),
        (["--by", "recall", "--probes", "cpy"], r"^--probes: there is no 'cpy'\. Did you mean 'copy'\?$"),
        (["--by", "recall", "--lengths", "4"], r"^--lengths: 4 is too short for a probe\. Give lengths from 16 up\.$"),
        (
            ["--by", "spectrum", "--lengths", "64k"],
            r"fewer than 65,536\. Give shorter lengths, or more text \(--data\)",
        ),
        (["--lengths", "64"], "^--lengths: the shortest takes 10 documents of 96 tokens"),
        (["--plot", "plot.txt"], r"^plot\.txt: cannot be drawn"),
        (["--json", "nowhere/numbers.json"], r"^nowhere/numbers\.json: its folder is missing"),
        (["--data", "nowhere.txt"], r"^nowhere\.txt: no such file .*Correct --data\.$"),
    ]:
        with pytest.raises(UsageError, match=message):
            evaluated(run, *words)


def test_measurements_name_options_of_the_command() -> None:
    assert {name for names in OPTIONS.values() for name in names} <= {option.name for option in eval_.params}


def test_files_of_data_that_are_not_read_are_named(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "train.txt").rename(tmp_path / "texts" / "a.txt")
    (tmp_path / "texts" / "b.mobi").touch()
    done = evaluated(run, "--lengths", "16", "--data", "texts", "--by", "context", *FEW)
    assert done.stderr.startswith(
        "--data: left out, an unsupported e-book format: convert it to EPUB or plain text: texts/b.mobi\n"
    )


def test_the_difference_of_two_runs_comes_first_with_its_paired_error(run: Path, tmp_path: Path) -> None:
    other, latest = tmp_path / "runs" / "other", "checkpoints/latest"
    shutil.copytree(run, other, symlinks=True)
    words = ("--lengths", "16", "--by", "context,position", *FEW)
    same, rounded = evaluated(run, other, *words), evaluated(run, other, *words, "--weights", "bf16", "--json", "-")
    assert same.stdout.splitlines()[3].endswith("in bits/byte on the same bytes of 2 documents:")
    assert same.stdout.splitlines()[6].split()[:3] == ["16", "+0.0000", "0.0000"]
    (found,) = json.loads(rounded.stdout)["differences"]
    assert (found["run"], found["base"]) == (str(other), str(run))
    assert [(row["length"], row["difference"], row["documents"]) for row in found["rows"]] == [(16, 0, 2), (None, 0, 2)]
    trained = evaluated(run, run / latest, "--data", tmp_path / "train.txt", "--lengths", "16", *FEW)
    assert "2 documents" not in trained.stdout


def without_times(found: Any) -> Any:
    """The numbers of a report but for those that no two measurements share."""
    if isinstance(found, dict):
        return {key: without_times(each) for key, each in found.items() if key not in ("seconds", "peak_bytes")}
    return [without_times(each) for each in found] if isinstance(found, list) else found


def test_python_gives_the_numbers_of_the_command(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train = tmp_path / "train.txt"
    views = ("context", "position", "state")
    words = ["--lengths", "32,16", "--by", ",".join(views), "--targets", 50, "--tokens", 300, "--data", train, *FEW]
    told = json.loads(evaluated(run, *words, "--json", "-").stdout)
    capfd.readouterr()
    options: dict[str, Any] = {"lengths": [32, 16], "views": views, "targets": 50, "tokens": 300, "min_documents": 1}
    for model in (run, load(run, "cpu")):
        report = lmlong.evaluate(model, train, name=str(run), **options)
        assert without_times(values(report)["runs"]) == without_times(told["runs"])
    assert capfd.readouterr() == ("", "")
    assert [at["position"] for at in told["runs"][0]["state"]] == [1, 2, 4, 8, 16, 32]


def test_texts_in_memory_are_documents_like_files(run: Path, tmp_path: Path) -> None:
    texts = ["the cat sat on the mat " * 5, "", "a dog ran " * 9]
    for number, text in enumerate(texts):
        (tmp_path / f"text-{number}.txt").write_text(text)
    options: dict[str, Any] = {"lengths": [16], "min_documents": 1, "name": "same"}
    files = [str(tmp_path / f"text-{number}.txt") for number in range(3)]
    in_files, in_memory = lmlong.evaluate(run, files, **options), lmlong.evaluate(run, texts=texts, **options)
    assert (in_files.data, in_memory.data) == (files, [])
    in_files.data = []
    assert without_times(values(in_memory)) == without_times(values(in_files))
    assert in_memory.documents == 2
    first = lmlong.evaluate(run, texts=texts[0], **options)
    assert first.documents == 1 and first.carried is not None
    assert first.carried.totals.bytes == len(texts[0])


def test_a_mistake_in_python_is_named(run: Path) -> None:
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"views": ["contxt"]}, r"^views: there is no 'contxt'\. Did you mean 'context'\?"),
        ({"lengths": [16, 0]}, r"^lengths: \[16, 0\] are not lengths"),
        ({"lengths": []}, r"^lengths: \[\] are not lengths"),
        ({"files": "a.txt", "texts": ["a"]}, "^files, texts: both are given"),
        ({"texts": ""}, "^files, texts: empty"),
        ({"files": []}, "^files, texts: empty"),
        ({"lengths": [32], "min_documents": 1, "precision": "16"}, "^precision: 16 needs a GPU"),
    ]
    for options, message in mistakes:
        with pytest.raises(UsageError, match=message):
            lmlong.evaluate(run, **options)


def trained_in_bf16(loaded: TrainedLanguageModel, monkeypatch: pytest.MonkeyPatch) -> TrainedLanguageModel:
    """Return the model as if it had been trained in bf16, on a machine that computes in it."""
    monkeypatch.setattr(device_module, "computes_in_bf16", lambda device: True)
    training = loaded.recipe.training.model_copy(update={"precision": "bf16"})
    return dataclasses.replace(loaded, recipe=loaded.recipe.model_copy(update={"training": training}))


def test_a_run_is_measured_in_the_precision_it_was_trained_in(
    loaded: TrainedLanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"lengths": [32], "min_documents": 1, "name": "same"}
    unknown, exact = (lmlong.evaluate(loaded, precision=each, **options) for each in (None, "32"))
    assert without_times(values(unknown)) == without_times(values(exact))
    own = lmlong.evaluate(trained_in_bf16(loaded, monkeypatch), **options)
    assert (exact.precision, own.precision) == ("32", "bf16")
    assert "; precision bf16\n" in perplexity_report([own]).text() and values(own)["runs"][0]["precision"] == "bf16"
    assert exact.carried and own.carried
    assert 0 < abs(own.carried.totals.nats_per_token - exact.carried.totals.nats_per_token) < 0.05
    again = lmlong.evaluate(trained_in_bf16(loaded, monkeypatch), precision="32", **options)
    assert without_times(values(again)) == without_times(values(exact))
