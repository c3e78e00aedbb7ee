"""The comparison of attentions: whom it compares, how it chooses, what it says."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from machine import new_cache

from lmlong.errors import DivergedError
from lmlong.experiments import compare
from lmlong.experiments.compare import (
    CandidateResult,
    ComparedRun,
    compare_attentions,
    figure,
    table,
    write_copies,
)
from lmlong.model.base import count_parameters
from lmlong.model.language_model import LanguageModel
from lmlong.recipe import file as recipe_file
from lmlong.recipe.candidates import CANDIDATES
from lmlong.report.figure import Panel

TINY = ["model.width=16", "model.layers=2", "model.heads=2", "training.steps=3", "training.batch_size=2"]


def test_all_candidates_are_of_one_size() -> None:
    counts = {}
    for name, options in CANDIDATES.items():
        chosen = recipe_file.load("compare", [f"model.attention.{key}={value}" for key, value in options.items()])
        with torch.device("meta"):
            counts[name] = count_parameters(LanguageModel(chosen.model, chosen.text.tokenizer.vocabulary))
    assert max(counts.values()) / min(counts.values()) < 1.05, counts  # n-gram heads have no queries and keys


def test_runs_are_measured_and_reused_only_for_the_same_settings_and_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMLONG_CACHE", str(new_cache(tmp_path)))
    write_copies(tmp_path / "copies.jsonl", documents=60)
    source = json.dumps([{"kind": "files", "paths": [str(tmp_path / "copies.jsonl")]}])
    changes = [*TINY, f"text.sources={source}", "text.tokenizer.kind=bytes", "text.sequence_length=32"]

    def compared(*more: str, names: Sequence[str] = ("elu",), seeds: int = 1) -> list[CandidateResult]:
        return compare_attentions("compare", [*changes, *more], names, [1e-2], seeds, tmp_path / "out")[0]

    linear, softmax = compared(names=["elu", "softmax"], seeds=2)
    first, second = linear.runs
    assert (first.seed, second.seed) == (0, 1) and 1 < first.bits_per_byte != second.bits_per_byte < 8.5
    assert first.tokens == 3 * 2 * 32
    tail, position = 3 * 48, 8
    assert first.state_bytes == 2 * 4 * (2 * 8 * 9 + tail) + position
    assert softmax.first.state_bytes == 2 * (4 * tail + 32 * (2 * 16 * 4 + 1)) + position

    (log,) = (tmp_path / "out").glob("elu-0.01-1-*/metrics.jsonl")
    log.unlink()
    assert compared(seeds=2) == [linear] and not log.exists()  # not trained again
    (longer,) = compared("training.steps=4")
    assert longer.first.tokens == 4 * 2 * 32
    write_copies(tmp_path / "copies.jsonl", documents=60, seed=1)
    (other_text,) = compared()
    assert other_text.mean != first.bits_per_byte


def test_a_standing_is_a_mean_and_a_deviation() -> None:
    runs = [ComparedRun("elu", 0.01, seed, bits, 100, 5000.0, 10**6, 2048) for seed, bits in enumerate((1.0, 2.0, 3.0))]
    elu = CandidateResult("elu", runs)
    assert (elu.mean, elu.spread, CandidateResult("elu", runs[:1]).spread) == (2, 1, 0)
    worse = [run._replace(candidate="relu", bits_per_byte=4.0) for run in runs]
    relu = CandidateResult("relu", worse)
    lines = table([relu, elu]).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["elu", "relu"]
    assert lines[1].split()[1:] == ["2.0000", "1.0000", "0.01", "1,000,000", "5,000", "2.0", "KiB"]
    assert max(map(len, lines)) <= 80
    ((panel,),) = figure([relu, elu]).rows
    assert isinstance(panel, Panel) and panel.y_names == ["elu, 2.0 KiB", "relu, 2.0 KiB"]
    mean, seeds = panel.lines
    assert list(zip(mean.x, mean.y, strict=True)) == [(2.0, 0), (4.0, 1)]
    assert list(zip(seeds.x, seeds.y, strict=True)) == [(1.0, 0), (2.0, 0), (3.0, 0), (4.0, 1), (4.0, 1), (4.0, 1)]


def test_copies_say_the_same_line_again(tmp_path: Path) -> None:
    write_copies(tmp_path / "a.jsonl", documents=50, block=30, times=4)
    texts = [json.loads(line)["text"] for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert len(set(texts)) == 50
    for text in texts:
        lines = text.splitlines()
        assert len(lines) == 4 and len(set(lines)) == 1 and len(lines[0]) == 30
    assert len(set("".join(texts))) == 27


def test_rates_beyond_the_grid_are_tried_until_the_best_is_not_at_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(recipe: str, overrides: object, name: str, rate: float, seed: int, out: Path) -> ComparedRun:
        if rate not in bits:
            raise DivergedError("the loss is nan")
        return ComparedRun(name, rate, seed, bits[rate], 100, 5000.0, 10**6, 2048)

    def tried() -> list[tuple[float, int]]:
        """Return the rate and the seed of each run, and check that the best rate is chosen."""
        (result,), runs = compare_attentions("compare", [], ["elu"], [0.01, 0.02], 2, tmp_path)
        assert result.first.bits_per_byte == min(run.bits_per_byte for run in runs)
        return [(run.rate, run.seed) for run in runs]

    monkeypatch.setattr(compare, "trained_run", trained)
    bits = {0.01: 3.0, 0.02: 2.5, 0.04: 2.0, 0.08: 2.1}
    assert tried() == [(0.01, 0), (0.02, 0), (0.04, 0), (0.08, 0), (0.04, 1)]
    bits = {0.01: 3.0, 0.02: 2.5, 0.04: 2.0}
    assert tried() == [(0.01, 0), (0.02, 0), (0.04, 0), (0.04, 1)]  # 0.08 diverges
    bits = {0.005: 3.0, 0.01: 2.5, 0.02: 2.6}
    assert tried() == [(0.01, 0), (0.02, 0), (0.005, 0), (0.01, 1)]
    bits = {0.01: 3.0, 0.02: 3.0}
    assert tried() == [(0.01, 0), (0.02, 0), (0.01, 1)]
    bits = {0.01 * 2.0**n: 9.0 - n for n in range(10)}
    assert len(tried()) == 2 + compare.BEYOND + 1
