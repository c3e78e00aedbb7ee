"""Repeats planted in a sequence of bases: copies are where they are told to be, and costs are of their bases."""

import json
import math
import random
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from interop.exported import write_run
from planted_parts.repeats import (
    MARGIN,
    Genome,
    Repeat,
    chain_sequence,
    plant_repeats,
    repeat_costs,
    training_sequence,
)

import lmlong
from lmlong.data.tokenizers.characters import CharacterTokenizer

TOOL = Path(__file__).parents[2] / "tools" / "planted_repeats.py"
SEGMENT = 48


@pytest.fixture(scope="module")
def genome() -> Genome:
    return plant_repeats(12_000, (64, 512, 4096), 5, seed=3, segment=SEGMENT, mutation=0.1)


def copies(genome: Genome, repeat: Repeat) -> tuple[str, str]:
    first, second = repeat.first, repeat.first + repeat.distance
    return genome.bases[first : first + repeat.length], genome.bases[second : second + repeat.length]


def test_a_sequence_follows_from_its_seed(genome: Genome) -> None:
    assert genome == plant_repeats(12_000, (64, 512, 4096), 5, seed=3, segment=SEGMENT, mutation=0.1)
    assert genome.bases != plant_repeats(12_000, (64, 512, 4096), 5, seed=4, segment=SEGMENT).bases
    assert len(genome.bases) == 12_000 and set(genome.bases) == set("ACGT")
    assert training_sequence(9000, 1) == training_sequence(9000, 1) != training_sequence(9000, 2)


def test_copies_are_exact_or_mutated_as_told(genome: Genome) -> None:
    assert len(genome.repeats) == 3 * 2 * 5
    changed = []
    for repeat in genome.repeats:
        one, other = copies(genome, repeat)
        if repeat.mutated:
            changed.append(sum(a != b for a, b in zip(one, other, strict=True)) / SEGMENT)
        else:
            assert one == other
    assert 0.07 < np.mean(changed) < 0.13


def test_no_two_copies_are_closer_than_the_margin(genome: Genome) -> None:
    begins = sorted(begin for one in genome.repeats for begin in (one.first, one.first + one.distance))
    # the near copies of one repeat are closer to each other: 64 bases from beginning to beginning
    assert min(np.diff(begins)) == 64
    others = [gap for gap in np.diff(begins) if gap != 64]
    assert min(others) >= SEGMENT + MARGIN


def test_the_chain_has_something_to_learn_and_is_the_same_for_every_seed() -> None:
    """The entropy of a base given the three before is below two bits, and about that by the counts of another seed."""
    first, other = (chain_sequence(60_000, random.Random(seed)) for seed in (1, 2))
    counts: dict[str, list[float]] = {}
    for place in range(3, len(first)):
        counts.setdefault("".join(first[place - 3 : place]), [0.5] * 4)["ACGT".index(first[place])] += 1
    bits = [
        -math.log2(of["ACGT".index(other[place])] / sum(of))
        for place in range(3, len(other))
        for of in [counts["".join(other[place - 3 : place])]]
    ]
    assert 1.6 < np.mean(bits) < 1.95


def test_a_training_sequence_repeats_itself_and_another_does_not() -> None:
    def seen_before(text: str) -> float:
        grams = [text[place : place + 20] for place in range(len(text) - 20)]
        return 1 - len(set(grams)) / len(grams)

    assert 0.15 < seen_before(training_sequence(30_000, 1)) < 0.45
    assert seen_before("".join(plant_repeats(30_000, (), 0, 1).bases)) < 0.001


def test_costs_are_of_the_bases_of_each_copy(genome: Genome, tmp_path: Path) -> None:
    write_run(tmp_path / "tiny", CharacterTokenizer("ACGT"))
    loaded = lmlong.load(tmp_path / "tiny")
    found = repeat_costs(loaded, genome, "tiny")
    ids = torch.tensor([[4, *loaded.tokenizer.encode(genome.bases)]])
    log_p = loaded.model(ids)[0].log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0].double().detach()
    assert found.bits_per_base == pytest.approx(float(-log_p.mean()) / math.log(2), rel=1e-4)
    far = next(cost for cost in found.costs if cost.distance == 4096 and not cost.mutated)
    repeats = [one for one in genome.repeats if one.distance == 4096 and not one.mutated]
    for repeat, first, second in zip(repeats, far.first, far.second, strict=True):
        for begin, bits in ((repeat.first, first), (repeat.first + 4096, second)):
            assert bits == pytest.approx(float(-log_p[begin : begin + SEGMENT].mean()) / math.log(2), rel=1e-3)
    assert far.saved == pytest.approx(np.mean(far.first) - np.mean(far.second))


def test_the_tool_writes_a_sequence_and_measures_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "runs" / "tiny", CharacterTokenizer("ACGTN"))
    monkeypatch.chdir(tmp_path)
    for words in (
        "write genome.fa --bases 9000",
        "measure runs/tiny --bases 8k --distances 256 1k --each 2 --json found.json --plot found.png",
    ):
        monkeypatch.setattr(sys, "argv", [str(TOOL), *words.split()])
        runpy.run_path(str(TOOL), run_name="__main__")
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 3 and max(map(len, shown)) <= 80 and [line.split()[-6] for line in shown[1:]] == ["256", "1k"]
    header, *lines = Path("genome.fa").read_text().splitlines()
    assert header == ">made-up, seed 1" and "".join(lines) == training_sequence(9000, 1)
    (model,) = json.loads(Path("found.json").read_text())["models"]
    assert [len(cost["second"]) for cost in model["costs"]] == [2] * 4 and Path("found.png").stat().st_size > 1000
