"""What a run logs: its own lines, as they happen and cut back to where it resumes, and the same for loggers."""

import csv
import json
import math
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lmlong.cli.after_training import after_training
from lmlong.errors import UsageError
from lmlong.training import loggers
from lmlong.training.metrics_log import MetricsLog, last_validation, read_entries
from lmlong.training.run import TrainingResult, train

from .conftest import Recipes, logged_steps, losses, metrics

NAMES = {"PPMd": "final/PPMd", "lzma": "final/lzma", "unigram": "final/unigram", "gzip -9": "final/gzip"}
"""The figures of baselines, by the beginning of the line that prints each."""


def next_second() -> None:
    """Wait for a new second: files of TensorBoard have it in their names, and are read in the order of these."""
    begin = int(time.time())
    while int(time.time()) == begin:
        time.sleep(0.01)


def events(run: Path) -> EventAccumulator:
    return EventAccumulator(str(run / "tensorboard")).Reload()


def of(run: Path) -> dict[int, float]:
    return dict(zip(logged_steps(run), losses(run), strict=True))


def assert_as_printed(figures: dict[str, float], result: TrainingResult) -> None:
    printed = after_training(result).splitlines()
    assert printed[0].startswith(f"validation   {figures['final/bits_per_byte']:.3f} bits per byte")
    assert f"{figures['final/bytes']:,.0f} bytes" in printed[0]
    for line, name in zip(printed[1:5], NAMES, strict=True):
        assert line.startswith(f"{name:12} {figures[NAMES[name]]:.3f} ")


def test_tensorboard_receives_metrics_recipe_and_figures_of_all_starts(recipe_of: Recipes, tmp_path: Path) -> None:
    run, options = tmp_path / "run", ["training.loggers=[tensorboard]", "training.keep_last=9"]
    train(recipe_of(*options, "training.steps=6"), run)
    writers = [thread for thread in threading.enumerate() if type(thread).__module__.startswith("tensorboard")]
    assert not writers, "its files are closed"
    assert len([*(run / "tensorboard").glob("events.*")]) == 1  # two may be read in any order
    next_second()
    result = train(recipe_of(*options), run, resume=str(run / "checkpoints" / "step-00000004"))
    logged = events(run)
    assert [event.step for event in logged.Scalars("loss")] == [*range(1, 13)]
    assert {event.step: event.value for event in logged.Scalars("loss")} == pytest.approx(of(run), rel=1e-6)
    last = metrics(run)[-1]["validation"]["bits_per_byte"]
    assert logged.Scalars("validation/bits_per_byte")[-1].value == pytest.approx(last, rel=1e-6)
    texts = logged.Tensors("recipe/text_summary")
    assert [text.step for text in texts] == [1, 5]
    lines = texts[-1].tensor_proto.string_val[0].decode().splitlines()
    assert lines == [f"    {line}" for line in (run / "recipe.yaml").read_text().splitlines()]  # code to Markdown
    final = {tag: logged.Scalars(tag) for tag in logged.Tags()["scalars"] if tag.startswith("final/")}
    assert_as_printed({tag: values[-1].value for tag, values in final.items()}, result)
    assert all([event.step for event in final[tag]] == [12] for tag in NAMES.values())
    next_second()
    train(recipe_of(*options), run, resume="auto")  # takes no step
    assert [event.step for event in events(run).Scalars("final/gzip")] == [12]


def test_csv_is_continued(recipe_of: Recipes, tmp_path: Path) -> None:
    run, options = tmp_path / "run", ("training.loggers=[csv]", "training.validate_every=4")
    train(recipe_of(*options, "training.steps=4"), run)
    result = train(recipe_of(*options), run, resume="auto")
    parts = sorted((run / "csv").iterdir())
    assert [part.name for part in parts] == ["from-00000000", "from-00000004"]
    rows = [row for part in parts for row in csv.DictReader((part / "metrics.csv").open())]
    logged = {int(row["step"]): float(row["loss"]) for row in rows if row["loss"]}
    assert logged == pytest.approx(of(run), rel=1e-6) and list(logged) == [*range(1, 13)]
    assert any(row["validation/bits_per_byte"] for row in rows)
    assert_as_printed({key: float(value) for key, value in rows[-1].items() if key.startswith("final/")}, result)
    assert "model.attention.kind" in (parts[0] / "hparams.yaml").read_text()
    train(recipe_of("training.steps=1"), run, overwrite=True)


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Iterate over the records of a file of wandb, which is a log of LevelDB after a header of 7 bytes: each part with
    checksum, size and kind (whole, first, middle, last), none of which crosses a block of 32 KiB."""
    place, block, held = 7, 2**15, b""
    while place < len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        held += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            yield held
            held = b""


@pytest.mark.interop
def test_wandb_has_the_same_offline(recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    result = train(recipe_of("training.loggers=[wandb]"), tmp_path / "run")
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    steps: dict[int, float] = {}
    options, summary, files = {}, {}, set()
    for data in wandb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        steps |= {items["trainer/global_step"]: items["loss"]} if "loss" in items else {}
        options |= {item.key: item.value_json for item in [*record.run.config.update, *record.config.update]}
        summary |= {
            item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.summary.update
        }
        files |= {item.path for item in record.files.files}
    assert steps == pytest.approx(of(tmp_path / "run"), rel=1e-6)
    assert "model.attention.kind" in options
    assert_as_printed(summary, result)
    kept = file.parent / "files"
    recipe = (tmp_path / "run" / "recipe.yaml").read_text()
    assert "recipe.yaml" in files and (kept / "recipe.yaml").read_text() == recipe
    train(recipe_of("training.steps=1"), tmp_path / "run", overwrite=True)


def test_missing_logger_is_refused(recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install -e '\.\[wandb\]'"):
        train(recipe_of("training.loggers=[csv, wandb]"), tmp_path / "run")


GARBAGE = (b"garbage\n", b"\xff\xfe\x00\n", b"[]\n", b'{"step": "3"}\n', b"\n", b'{"loss": 1}\n', b"[" * 10_000 + b"\n")


def test_later_and_invalid_lines_are_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics_log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in (10, 20, 20, 30):
        metrics_log.write(step=step, loss=step / 10)
    lines = metrics_log.path.read_bytes().splitlines(keepends=True)
    metrics_log.path.write_bytes(b"".join([lines[0], *GARBAGE, *lines[1:], b'{"step": 4']))
    metrics_log.cut_back(20)
    assert metrics_log.path.read_bytes() == b"".join(lines[:3])
    assert f"{len(GARBAGE)} invalid lines were dropped" in capsys.readouterr().err


def test_nonfinite_numbers_become_null(tmp_path: Path) -> None:
    metrics_log = MetricsLog(tmp_path / "metrics.jsonl")
    metrics_log.cut_back(5)
    assert not metrics_log.path.exists(), "a missing log is not created"
    metrics_log.write(step=1, loss=math.nan, gradient_norm=math.inf, validation={"nats": math.inf})
    written = json.loads(metrics_log.path.read_text())
    assert written == {"step": 1, "loss": None, "gradient_norm": None, "validation": {"nats": None}}


LARGE = "1" + "0" * 400


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 1e3}',
        '{"step": true}',
        '{"step": -1}',
        '{"step": ' + LARGE + "}",
        '{"step": 2, "loss": "low"}',
        '{"step": 2, "loss": ' + LARGE + "}",
        '{"step": 2, "loss": NaN}',
        '{"step": 2, "loss": 1e999}',
        '{"step": 2, "bits_per_byte": [1]}',
        '{"step": 2, "validation": 3}',
        '{"step": 2, "validation": {}}',
        '{"step": 2, "validation": {"bits_per_byte": null}}',
        '{"step": 2, "validation": {"bits_per_byte": {}}}',
        '{"step": 2, "final_validation": {"nats": ' + LARGE + "}}",
        "[" * 100_000,
        "9" * 5000,
    ],
)
def test_invalid_line_is_skipped_when_read(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    step = {"step": 1, "loss": None, "bits_per_byte": 3, "event": "a spike"}
    validation = {"step": 1, "validation": {"bits_per_byte": 2.5}}
    path.write_text(f"{json.dumps(step)}\n{line}\n{json.dumps(validation)}\n")
    assert read_entries(path) == [step, validation]
    assert last_validation(read_entries(path)) == {"step": 1, "bits_per_byte": 2.5}
