"""`lmlong eval` and `lmlong.evaluate` as their users meet them."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from evaluation.reports import values
from models import write_run

import lmlong
from lmlong.cli.evaluate import OPTIONS, eval_
from lmlong.errors import UsageError
from lmlong.evaluation.perplexity_report import perplexity_report
from lmlong.inference.loading import TrainedLanguageModel, load
from lmlong.model import device as device_module

FEW = ("--min-documents", 1)


def evaluated(*words: object) -> Result:
    done = CliRunner().invoke(eval_, [str(word) for word in (*words, "--device", "cpu")], catch_exceptions=False)
    assert done.exit_code == 0
    return done


def told(*words: object) -> Any:
    """What JSON on standard output, where nothing else is, holds of the runs."""
    return json.loads(evaluated(*words, "--json", "-", *FEW).stdout)["runs"]


def without_speed(printed: str) -> str:
    return re.sub(r"tokens read in .* at most", "", printed)


def without_times(found: Any) -> Any:
    """The numbers of a report but for those that no two measurements share."""
    if isinstance(found, dict):
        return {key: without_times(each) for key, each in found.items() if key not in ("seconds", "peak_bytes")}
    return [without_times(each) for each in found] if isinstance(found, list) else found


def test_python_gives_the_numbers_of_the_command(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train, latest = tmp_path / "train.txt", run / "checkpoints" / "latest"
    words = ("--lengths", "32,16", "--by", "context,position,state", "--targets", 50, "--tokens", 300, "--data", train)
    first, second = without_times(told(run, latest, *words))
    capfd.readouterr()
    views: Any = ("context", "position", "state")
    options: dict[str, Any] = {"lengths": [32, 16], "views": views, "targets": 50, "tokens": 300, "min_documents": 1}
    for model, name, expected in ((run, run, first), (load(run, "cpu"), latest, second)):
        report = lmlong.evaluate(model, train, name=str(name), **options)
        assert without_times(values(report)["runs"]) == [expected]
    assert capfd.readouterr() == ("", "")
    assert (first["carried"]["bytes"], first["carried"]["tokens"]) == (train.stat().st_size, train.stat().st_size + 1)
    assert [at["position"] for at in first["state"]] == [1, 2, 4, 8, 16, 32]


def test_learning_is_measured_beside_the_model_alone(run: Path, tmp_path: Path) -> None:
    learns = tmp_path / "runs" / "learns"
    write_run(learns, chosen=load(run, "cpu").recipe.model_copy(update={"learn": True}), step=7)
    data = tmp_path / "validation-0.txt"
    options = ("--lengths", "32,64", "--by", "context,position,state", "--data", data)
    (plain, learning), (alone,) = (without_times(told(*words, *options)) for words in ((run, "--learn"), (run,)))
    assert alone == plain
    assert (plain["run"], learning["run"]) == (str(run), f"{run}, learning")
    for view in ("context", "position"):
        assert plain[view][-1]["nats"] > learning[view][-1]["nats"]
    assert plain["state"] == learning["state"] != []  # only the output layer learns
    assert plain["state_bytes"] < learning["state_bytes"]
    for words, names in (((), [str(learns), f"{learns}, learning"]), (("--no-learn",), [str(learns)])):
        assert [each["run"] for each in told(learns, *words, "--lengths", "32")] == names


def test_options_reach_the_measure(run: Path) -> None:
    words = (run, "--tokens", 120, "--lengths", "10")
    (whole,) = told(*words, "--targets", 15)
    assert (whole["documents"], whole["context"][0]["tokens"]) == (1, 15)
    for option in ("--weights", "--precision"):
        (rounded,) = told(*words, option, "bf16")
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


def test_the_tables_are_all_of_standard_output_the_difference_of_two_runs_first(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "runs" / "other"
    shutil.copytree(run, other, symlinks=True)
    lengths = ("--lengths", "16,4k")
    printed = evaluated(run, other, *lengths, *FEW).stdout
    options: Any = {"views": ("context", "position"), "lengths": (16, 4096), "min_documents": 1}
    reports = perplexity_report([lmlong.evaluate(each, name=str(each), **options) for each in (run, other)])
    assert without_speed(printed) == without_speed(reports.text() + "\n")
    assert "  left out: 4k, which too few documents reach;\n" in printed
    assert printed.splitlines()[3].endswith("in bits/byte on the same bytes of 2 documents:")
    assert printed.splitlines()[6].split()[:3] == ["16", "+0.0000", "0.0000"]

    (found,) = json.loads(evaluated(run, other, *lengths, *FEW, "--json", "-").stdout)["differences"]
    assert (found["run"], found["base"]) == (str(other), str(run))
    assert [(row["length"], row["difference"], row["documents"]) for row in found["rows"]] == [(16, 0, 2), (None, 0, 2)]


def test_texts_in_memory_are_documents_like_files(run: Path, tmp_path: Path) -> None:
    texts = ["the cat sat on the mat " * 5, "", "a dog ran " * 9]
    for number, text in enumerate(texts):
        (tmp_path / f"text-{number}.txt").write_text(text)
    files: Any = [str(tmp_path / f"text-{number}.txt") for number in range(3)]
    options: dict[str, Any] = {"lengths": [16], "min_documents": 1, "name": "same"}
    for chosen, documents in ((slice(3), 2), (0, 1)):
        in_files = lmlong.evaluate(run, files[chosen], **options)
        in_memory = lmlong.evaluate(run, texts=texts[chosen], **options)
        assert (in_files.data, in_memory.data) == (files if documents == 2 else files[:1], [])
        in_files.data = []
        assert without_times(values(in_memory)) == without_times(values(in_files))
        assert in_memory.documents == documents


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
    exact = lmlong.evaluate(loaded, precision="32", **options)
    own = lmlong.evaluate(trained_in_bf16(loaded, monkeypatch), **options)
    assert (exact.precision, own.precision) == ("32", "bf16")
    assert "; precision bf16\n" in perplexity_report([own]).text() and values(own)["runs"][0]["precision"] == "bf16"
    assert exact.carried and own.carried
    assert 0 < abs(own.carried.totals.nats_per_token - exact.carried.totals.nats_per_token) < 0.05
    again = lmlong.evaluate(trained_in_bf16(loaded, monkeypatch), precision="32", **options)
    assert without_times(values(again)) == without_times(values(exact))
