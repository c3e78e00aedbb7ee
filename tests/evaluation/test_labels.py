"""What `lmlong eval` reports of a model of labels: accuracy, by length, and the confusion of labels."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from commands import lmlong
from labelled import label_recipe, write_table
from machine import new_cache

from lmlong.evaluation.labels import Predictions, measure_labels
from lmlong.inference.loading import load_classifier
from lmlong.training.run import train


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LMLONG_CACHE", str(new_cache(tmp_path)))
    write_table(tmp_path / "train.jsonl", 60, 1, labels=("no", "yes", "yes"))
    train(label_recipe(tmp_path, **{"training.steps": 4}), tmp_path / "run")
    return tmp_path / "run"


def test_eval_prints_and_writes_what_counting_gives(run: Path, tmp_path: Path) -> None:
    model = load_classifier(run, "cpu")
    records = [json.loads(line) for line in (tmp_path / "held-out.jsonl").read_text().splitlines()]
    pairs = [(each["label"], model.classify(each["text"])) for each in records]
    correct = sum(label == each.label for label, each in pairs)
    done = lmlong("eval", "run", "--json", "found.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads((tmp_path / "found.json").read_text())["runs"]
    assert (found["objective"], found["labels"], found["documents"]) == ("label", ["no", "yes"], 20)
    assert found["correct"] == correct and found["accuracy"] == correct / 20
    assert found["accuracy_error"] == pytest.approx(math.sqrt(correct / 20 * (1 - correct / 20) / 20))
    nats = [-math.log(each.probabilities[label]) for label, each in pairs]
    assert found["nats_per_document"] == pytest.approx(sum(nats) / 20, rel=1e-5)
    assert found["majority"] == 0.5  # yes is the most frequent label of the training text, and half of these
    for label in ("no", "yes"):
        for predicted in ("no", "yes"):
            count = sum(pair == (label, predicted) for pair in ((own, each.label) for own, each in pairs))
            assert found["confusion"][label][predicted] == count
    assert [part["documents"] for part in found["by_length"]] == [20] and found["cut"] == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "labels of documents, precision 32" and max(map(len, lines)) <= 80
    assert lines[2].split()[:2] == [f"{correct / 20:.3f}", f"{found['accuracy_error']:.3f}"]
    wrong = [[label, *predicted] for label, row in found["confusion"].items() for predicted in row.items()]
    rows = [line.split() for line in lines[lines.index("run: wrong labels, the most frequent first") + 2 :]]
    assert sorted(rows) == sorted([a, b, str(n), "10"] for a, b, n in wrong if a != b and n)


def test_other_files_are_measured_by_the_recipes_fields(run: Path, tmp_path: Path) -> None:
    long = write_table(tmp_path / "long.jsonl", 6, 3, words=9)
    done = lmlong("eval", run, run, "--data", long, "--json", "-")
    first, second = json.loads(done.stdout)["runs"]
    assert first == second and (first["documents"], first["majority"], first["cut"]) == (6, None, 6)
    assert "6 of 6 documents cut to 16 tokens, the longest in training" in lmlong("eval", run, "--data", long).stdout
    documents = 6 * [9 + 8 + 2]  # tokens: letters, spaces, bos and eos
    for tokens, count in ((2, 1), (2 * documents[0], 2), (3 * documents[0] - 1, 2)):
        some = json.loads(lmlong("eval", run, "--data", long, "--tokens", tokens, "--json", "-").stdout)["runs"][0]
        assert some["documents"] == count
    (tmp_path / "odd.jsonl").write_text('{"text": "a", "label": "noo"}\n' * 2)
    done = lmlong("eval", run, "--data", tmp_path / "odd.jsonl")
    assert done.returncode == 2 and "'noo' is a label of a document" in done.stderr and "'no'?" in done.stderr


def test_documents_are_divided_by_length_in_powers_of_two() -> None:
    tokens = np.array([3, 64, 65, 128, 129, 5000])
    parts = Predictions(np.array([0, 1, 0, 1, 1, 1]), np.array([0, 0, 0, 1, 1, 0]), np.zeros(6), tokens).by_length()
    assert [part.tokens.tolist() for part in parts] == [[3, 64], [65, 128], [129], [5000]]
    assert [part.accuracy.value for part in parts] == [0.5, 1, 1, 0]
    assert parts[0].accuracy.error == pytest.approx(math.sqrt(0.25 / 2))


def test_many_labels_are_shown_by_their_confusions(run: Path, tmp_path: Path) -> None:
    labels = [f"label-{number}" for number in range(9)]
    records = [{"text": f"text {number}", "label": labels[number % 9]} for number in range(45)]
    for name in ("train", "held-out"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    train(label_recipe(tmp_path, "causal", **{"training.steps": 1}), tmp_path / "nine")
    report = measure_labels("nine", load_classifier(tmp_path / "nine"))
    assert sum(sum(row.values()) for row in report.confusion.values()) == 45 == report.all.documents
    done = lmlong("eval", tmp_path / "nine")
    title, _, first, second, *_ = done.stdout.split("wrong labels")[1].splitlines()
    assert "the most frequent first" in title and int(first.split()[2]) >= int(second.split()[2])
    assert first.split()[3] == "5"
