"""The scripts of tools/experiments by small budgets: their tables, and that nothing is trained twice."""

import json
import random
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from machine import new_cache

SCRIPTS = Path(__file__).parents[2] / "tools" / "experiments"
Run = Callable[..., list[list[str]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a script in an empty folder, and return the words of each line that it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LMLONG_CACHE", str(new_cache(tmp_path)))
    monkeypatch.setenv("MPLBACKEND", "agg")

    def run(command: str) -> list[list[str]]:
        name, *words = command.split()
        monkeypatch.setattr(sys, "argv", [name, *words])
        runpy.run_path(str(SCRIPTS / name), run_name="__main__")
        plt.close("all")
        return [line.split() for line in capsys.readouterr().out.splitlines()]

    return run


def test_approximation(run: Run, tmp_path: Path) -> None:
    *_, small, large = run("approximation.py --seeds 10 --widths 16 --deviations 0.25 1 --features 32 64")
    assert (small[0], small[1], small[5]) == ("16", "0.25", "trig") and float(small[6]) > 1
    assert float(large[4]) > 5 * float(large[2])  # trigonometric features fail on large inputs
    assert (tmp_path / "approximation.png").exists()


def test_linformer_speed(run: Run, tmp_path: Path) -> None:
    lines = run("linformer_speed.py --lengths 16 64 --slots 8 32 --width 8 --heads 2")
    assert [line[1:] == ["-", "-", "-"] for line in lines if line[:1] == ["16"]]
    *_, step = [line for line in lines if line[:1] == ["64"]]
    forward = [line for line in lines if line[:1] == ["64"]][-2]
    assert all(float(more) > float(less) > 0 for more, less in zip(step[1:], forward[1:], strict=True))
    assert (tmp_path / "linformer-speed.png").exists()


@pytest.mark.slow
def test_recall_learns_and_resumes(run: Run, tmp_path: Path) -> None:
    command = "recall.py --only softmax --pairs 2 --widths 32 --vocabulary 12 --steps 120 --rates 1e-2"
    *_, line = lines = run(command)
    assert line[:2] == ["softmax", "32"] and float(line[-1]) > 0.95
    folder = tmp_path / "runs" / "recall" / "softmax-32-0.01"
    (folder / "result.json").unlink()
    assert run(command) == lines  # from the checkpoint after step 100
    (folder / "checkpoint.safetensors").unlink()
    assert run(command) == lines and not (folder / "checkpoint.safetensors").exists()
    with pytest.raises(SystemExit):
        run(f"{command} --queries 64")


@pytest.mark.slow
def test_compare_trains_nothing_twice(run: Run, tmp_path: Path) -> None:
    draw = random.Random(0)
    (tmp_path / "a.txt").write_text("\n".join(draw.choices(["the cat", "sat on", "the mat"], k=2000)))
    tiny = "text.tokenizer.kind=bytes text.sequence_length=32 model.width=16 training.steps=3 training.batch_size=2"
    source = 'text.sources=[{"kind":"files","paths":["a.txt"]}]'
    command = f"compare.py --only elu softmax --rates 1e-2 --seeds 2 --set {source} {tiny}"
    lines = run(command)
    assert {line[0] for line in lines[1:]} == {"elu", "softmax"}
    assert all(1 < float(line[1]) < 8.5 and float(line[2]) > 0 for line in lines[1:])
    logs = sorted(tmp_path.glob("runs/compare/*/*/metrics.jsonl"))
    before = [log.read_bytes() for log in logs]
    assert run(command) == lines and len(logs) == 4 and [log.read_bytes() for log in logs] == before


@pytest.mark.slow
def test_encoders_learn_labels_by_folds_and_train_nothing_twice(run: Run, tmp_path: Path) -> None:
    draw = random.Random(0)
    (tmp_path / "books").mkdir()
    for number in range(30):
        (tmp_path / "books" / f"{number}.txt").write_text(" ".join(draw.choices(["the cat", "sat on", "a mat"], k=300)))
    records = ({"text": f"{draw.random()} {word} cat", "label": word} for word in ["good", "bad"] * 20)
    (tmp_path / "labelled.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    size = "--length 32 --batch 64 --width 32 --layers 1 --vocabulary 300 --pretrain 0.01 --tune 0.005 --steps 1"
    kinds = "full linformer-8-mean causal linformer-8-mean-scratch"
    command = f"encoders.py books --labelled labelled.jsonl --folds 2 --kinds {kinds} {size}"
    lines = run(command)
    assert [line[0] for line in lines if line] == [
        *("kind", "full", "linformer-8-mean", "share", "full", "linformer-8-mean"),
        *("kind", "naive", "full", "linformer-8-mean", "causal", "linformer-8-mean-scratch"),
    ]
    losses, spectra, accuracies = lines[1:3], lines[5:7], lines[9:]
    assert all(float(line[3]) > 0 and float(line[6]) > 0 for line in losses) and float(losses[0][9]) == 0
    assert [line[1] for line in spectra] == ["1.000"] * 2
    assert float(accuracies[0][2]) == 1 and all(0 <= float(line[1]) <= 1 for line in accuracies[1:])  # "naive Bayes"
    logs = sorted(tmp_path.glob("runs/encoders/*/metrics.jsonl"))
    before = [log.read_bytes() for log in logs]
    assert run(command) == lines and len(logs) == 3 + 4 * 2 and [log.read_bytes() for log in logs] == before
