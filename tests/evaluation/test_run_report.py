"""`lmlong report`: what it contains, that nothing of a run becomes HTML, and what it leaves out."""

import json
import re
from pathlib import Path

import pytest
from commands import lmlong
from models import write_run
from report.test_html import ATTACK, Outline

from lmlong.checkpoint.read import read_recipe
from lmlong.evaluation import run_report
from lmlong.evaluation.run_page import run_page
from lmlong.evaluation.run_report import report_runs
from lmlong.evaluation.training_curves import TrainingCurves, training_panels
from lmlong.recipe import Recipe, Text, Training

ENVIRONMENT = {
    "begun": ATTACK,
    "packages": {"torch": ATTACK},
    "text": {
        "vocabulary": 258,
        "sources": [
            {"name": "files /home/me/train.txt", "train": {"documents": 3, "bytes": 12345, "tokens": 6789}},
            {"name": "files /home/me/validation", "validation": {"tokens": 4321}},
        ],
    },
}


def entry(step: int, loss: float, **more: object) -> str:
    return json.dumps({"step": step, "loss": loss, "bits_per_byte": loss / 2, "tokens_per_second": 384.0, **more})


VALIDATION = {"nats": 2.0, "tokens": 1, "bytes": 2, "nats_per_token": 3.0, "bits_per_byte": 1.4}
METRICS = (
    entry(2, 4.0, learning_rate=0.1, gradient_norm=1.0),
    entry(6, 2.0, learning_rate=0.2, gradient_norm=None),
    json.dumps({"step": 6, "validation": VALIDATION}),
    json.dumps({"step": 6, "sample": f"once {ATTACK}\u0000\u202e"}),
)


@pytest.fixture
def recorded(run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny run, with records of its training that attack the page."""
    monkeypatch.setattr(run_report, "DISTANCES", (64, 128))
    (run / "environment.json").write_text(json.dumps(ENVIRONMENT))
    (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in METRICS))
    return run


def test_a_page_is_made_of_what_training_recorded(recorded: Path, tmp_path: Path) -> None:
    done = lmlong("report", recorded, "-o", tmp_path / "page.html", "--no-measure")
    assert (done.returncode, done.stderr) == (0, "")
    made = (tmp_path / "page.html").read_text(encoding="utf-8")
    outline = Outline(made)
    assert {tag for tag, _ in outline.elements} & {"script", "b", "img"} == set()
    assert outline.text.count("<script>alert(1)</script>") >= 3, "the sample, the time, the packages"
    for folder in ("/home/me", "~me", str(tmp_path)):
        assert folder not in made, "files are named without their folders"
    sources = ("files train.txt", "files validation-*.txt", "12,345", "6,789", "4,321")
    for expected in (*sources, "lmlong train run.yaml", "sequence_length: 64"):
        assert expected in outline.text, expected
    headings = re.findall(r"<h2[^>]*>([^<]*)", made)
    assert headings[:4] == ["Summary", "Training text", "Training", "Samples"]
    assert not {"Recall", "Prediction by context"} & set(headings)
    assert len(made) < 100_000


def test_two_runs_are_measured_side_by_side(recorded: Path, tmp_path: Path) -> None:
    recipe = read_recipe(recorded / "checkpoints" / "step-00000007")
    other = recipe.model_copy(update={"seed": 5, "model": recipe.model.model_copy(update={"heads": 4})})
    write_run(tmp_path / "other" / "tiny", chosen=other, step=7)
    runs = (recorded, tmp_path / "other" / "tiny")
    done = lmlong("report", *runs, "-o", tmp_path / "page.html", "--tokens", "2k", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    outline = Outline((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "Report: tiny and tiny (2)" in outline.text
    differences = ("seed05", "model.heads24", "tiny (2) minus tiny, in bits/byte")
    for expected in (*differences, "--tokens 2048", "writing one text"):
        assert expected in outline.text, expected
    charts = [a["aria-label"] or "" for tag, a in outline.elements if tag == "svg" and a.get("role") == "img"]
    for name in ("by context", "by position", "copy", "induction", "mqar", "Norm of the state S"):
        (chart,) = [chart for chart in charts if chart.startswith(f"Line chart: {name},")]
        assert " tiny: " in chart and " tiny (2): " in chart


def test_a_page_names_the_text_that_was_measured(recorded: Path, tmp_path: Path) -> None:
    files = [tmp_path / "train.txt", tmp_path / "validation-0.txt"]
    (report,) = report_runs([recorded], files, tokens=600, device="cpu")
    assert report.measured and report.measured.perplexity
    assert report.measured.perplexity.data == list(map(str, files))
    for given, text in (
        (files, "train.txt and 1 other (given by --data)"),
        (files[:1], "train.txt (given by --data)"),
        ([], "held-out text"),
    ):
        measured = report.measured._replace(files=given)
        page = Outline(run_page([report._replace(measured=measured, path="runs/tiny")])).text
        assert f"measured on {text}" in page and f"Measured on {text}. By context" in page
        assert ("easured on held-out text" in page) == (not given)
        assert "lmlong eval runs/tiny --by" in page and "lmlong eval runs/tiny --by recall --probes" in page


def test_missing_parts_are_reported(recorded: Path, tmp_path: Path) -> None:
    (recorded / "environment.json").write_text('{"packages": "no dict"}')
    (recorded / "metrics.jsonl").unlink()
    done = lmlong("report", recorded, "-o", tmp_path / "page.html", "--tokens", "600", "--device", "cpu")
    left_out = {
        "Training text": "the run has no record of its text",
        "Training": "the run has no training metrics",
        "Samples": "training.sample_tokens is 0",
        "Prediction by context": "fewer than 10 parts reach 64, 256, 512, 1k, 2k, 4k, 8k, 16k",
    }
    assert done.stderr.splitlines() == [f"tiny: {name}: left out: {reason}" for name, reason in left_out.items()]
    outline = Outline((tmp_path / "page.html").read_text())
    for reason in left_out.values():
        assert f"tiny: left out: {reason}." in outline.text
    assert "2,688 tokens in 7 steps" in outline.text, "as the checkpoint knows"


def test_commands_name_runs_as_they_were_given(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = "In these commands, tiny stands for the path of the run."
    monkeypatch.chdir(tmp_path)
    for given, path in (
        ("runs/tiny", "runs/tiny"),
        ("tiny", "runs/tiny"),
        ("runs/../runs/tiny/checkpoints/latest", "runs/../runs/tiny"),
        (run, "tiny"),
    ):
        text = Outline(run_page(report_runs([given], measure=False, device="cpu"))).text
        assert f"lmlong train run.yaml --out {path}Written by" in text
        assert (note in text) == (given == run)


def test_what_cannot_be_measured_is_reported_and_left_out(recorded: Path, tmp_path: Path) -> None:
    for text in tmp_path.glob("validation-*.txt"):
        text.unlink()
    done = lmlong("report", recorded, "-o", tmp_path / "page.html", "--device", "cpu")
    assert done.returncode == 0 and done.stderr.count("tiny: not measured: ") == 2
    assert "Speed and size" in (made := (tmp_path / "page.html").read_text()) and "Recall" not in made


def test_another_name_is_refused_before_anything_is_measured(run: Path) -> None:
    done = lmlong("report", run, "-o", run / "recipe.yaml")
    assert done.returncode == 2 and "does not end in .html" in done.stderr


def test_time_is_the_sum_of_the_logged_speeds() -> None:
    recipe = Recipe(training=Training(batch_size=2), text=Text(sequence_length=64))
    curves = TrainingCurves.of("a", recipe, list(map(json.loads, METRICS)))
    step = 2 * 64 / 384
    assert curves.seconds.tolist() == pytest.approx([2 * step, 6 * step])
    by_step, by_time, rate, norm = training_panels([curves])
    assert [list(line.y) for line in by_step.lines] == [[2.0, 1.0], [1.4]]
    assert by_time.lines[0].x == pytest.approx([2 * step, 6 * step]) and "seconds" in by_time.x_label
    assert by_time.lines[1].x == pytest.approx([6 * step])
    assert (rate.lines[0].y, norm.lines[0].y[0]) == ([0.1, 0.2], 1.0)


def test_many_steps_are_averaged() -> None:
    entries = [json.loads(entry(step, float(step % 2))) for step in range(1, 1001)]
    (line, _) = training_panels([TrainingCurves.of("a", Recipe(), entries)])[0].lines
    assert len(line.x) == 200 and line.x[0] == 5 and line.y[0] == pytest.approx(0.3)
