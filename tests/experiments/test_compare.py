"""The comparison of attentions: whom it compares, how it chooses, what it says."""

import json
from pathlib import Path

import pytest
import torch

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


def test_each_is_trained_at_rates_around_its_best_and_there_by_every_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMLONG_CACHE", str(tmp_path / "cache"))
    write_copies(tmp_path / "copies.jsonl", documents=60)
    source = json.dumps([{"kind": "files", "paths": [str(tmp_path / "copies.jsonl")]}])
    changes = [*TINY, f"text.sources={source}", "text.tokenizer.kind=bytes", "text.sequence_length=32"]
    names = ["elu", "softmax"]
    results, runs = compare_attentions("compare", changes, names, [1e-5, 1e-2], 2, tmp_path / "out")
    for standing, name in zip(results, names, strict=True):
        *first, last = (run for run in runs if run.candidate == name)
        best = min(first, key=lambda run: run.bits_per_byte)
        assert [run.seed for run in first] == [0] * len(first) and (last.rate, last.seed) == (best.rate, 1)
        assert standing.runs == [best, last] and best.bits_per_byte != last.bits_per_byte
        rates = [run.rate for run in first]
        assert rates == [1e-5, 1e-2, *(1e-2 * 2**n for n in range(1, len(rates) - 1))]  # beyond the end of the grid,
        assert best is first[-2]  # until the next one is worse
        assert best.bits_per_byte < first[0].bits_per_byte < 8.5
    assert runs[0].tokens == 3 * 2 * 32
    linear, softmax = (standing.runs[0].state_bytes for standing in results)
    tail, position = 3 * 48, 8
    assert linear == 2 * 4 * (2 * 8 * 9 + tail) + position
    assert softmax == 2 * (4 * tail + 32 * (2 * 16 * 4 + 1)) + position

    (marker,) = (tmp_path / "out").glob(f"elu-{results[0].runs[1].rate:g}-1-*/metrics.jsonl")
    marker.unlink()
    again, _ = compare_attentions("compare", changes, names, [1e-5, 1e-2], 2, tmp_path / "out")
    assert again == results and not marker.exists()  # what is there is not trained again


def test_no_result_is_taken_for_that_of_other_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever differs: a number of steps, a width, or the very text."""
    monkeypatch.setenv("LMLONG_CACHE", str(tmp_path / "cache"))
    write_copies(tmp_path / "copies.jsonl", documents=60)
    source = json.dumps([{"kind": "files", "paths": [str(tmp_path / "copies.jsonl")]}])
    changes = [*TINY, f"text.sources={source}", "text.tokenizer.kind=bytes", "text.sequence_length=32"]
    found = set()
    for more in ([], ["training.steps=4"], ["model.width=32"], ["text.sequence_length=16"]):
        _, (run,) = compare_attentions("compare", [*changes, *more], ["elu"], [1e-2], 1, tmp_path / "out")
        found.add((run.bits_per_byte, run.tokens))
    write_copies(tmp_path / "copies.jsonl", documents=60, seed=1)
    _, (run,) = compare_attentions("compare", changes, ["elu"], [1e-2], 1, tmp_path / "out")
    assert len({*found, (run.bits_per_byte, run.tokens)}) == 5


def test_a_standing_is_a_mean_and_a_deviation() -> None:
    runs = [ComparedRun("elu", 0.01, seed, bits, 100, 5000.0, 10**6, 2048) for seed, bits in enumerate((1.0, 2.0, 3.0))]
    assert (
        CandidateResult("elu", runs).mean,
        CandidateResult("elu", runs).spread,
        CandidateResult("elu", runs[:1]).spread,
    ) == (2, 1, 0)
    worse = [run._replace(candidate="relu", bits_per_byte=4.0) for run in runs]
    lines = table([CandidateResult("relu", worse), CandidateResult("elu", runs)]).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["elu", "relu"]
    assert lines[1].split()[1:] == ["2.0000", "1.0000", "0.01", "1,000,000", "5,000", "2.0", "KiB"]
    assert max(map(len, lines)) <= 80
    ((panel,),) = figure([CandidateResult("relu", worse), CandidateResult("elu", runs)]).rows
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


def test_rates_beyond_the_grid_end_at_one_that_diverges_and_where_all_are_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bits = {0.01: 3.0, 0.02: 2.5, 0.04: 2.0, 0.005: 3.0}

    def trained(recipe: str, overrides: object, name: str, rate: float, seed: int, out: Path) -> ComparedRun:
        if rate not in bits:
            raise DivergedError("the loss is nan")
        return ComparedRun(name, rate, seed, bits[rate], 100, 5000.0, 10**6, 2048)

    monkeypatch.setattr(compare, "trained_run", trained)
    _, runs = compare_attentions("compare", [], ["elu"], [0.01, 0.02], 1, tmp_path)
    assert [run.rate for run in runs] == [0.01, 0.02, 0.04]  # 0.08 diverges
    bits[0.02] = 3.0
    _, runs = compare_attentions("compare", [], ["elu"], [0.01, 0.02], 1, tmp_path)
    assert [run.rate for run in runs] == [0.01, 0.02]
    bits.update({0.01 * 2.0**n: 9.0 - n for n in range(10)})
    _, runs = compare_attentions("compare", [], ["elu"], [0.01, 0.02], 1, tmp_path)
    assert len(runs) == 2 + compare.BEYOND
