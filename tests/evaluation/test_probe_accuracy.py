"""Probes ask for what was said exactly so far back, and answers are counted as right where they are."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import lmlong
from evaluation.conftest import VALIDATION_TEXTS
from models import predict

from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.evaluation.probe_accuracy import ProbeResult, ProbeScore, answered, chance_of, figure, recall_report
from lmlong.evaluation.probes import NEEDLES, PAIRS, PROBES, ProbeText, Trial
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.model import language_model
from lmlong.report.figure import Panel

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "theta", "iota"]
NEEDLES_TOLD = rf"(The secret word of \w+ is \w+\.\n){{{NEEDLES}}}"


def made(probe: str, distance: int, seed: int = 0) -> Trial:
    text = np.frombuffer("".join(VALIDATION_TEXTS).encode(), np.uint8)
    return PROBES[probe](ProbeText(ByteTokenizer(), text, WORDS), distance, np.random.default_rng(seed))


@pytest.mark.parametrize("probe", ["copy", "induction", "mqar"])
@pytest.mark.parametrize("distance", [16, 17, 1000])
def test_symbols_are_asked_for_after_exactly_the_distance(probe: str, distance: int) -> None:
    trial = made(probe, distance)
    assert np.array_equal(trial.tokens[trial.asked], trial.tokens[trial.asked - distance])
    assert np.array_equal(trial.tokens[trial.asked - 1], trial.tokens[trial.asked - 1 - distance])
    assert len(trial.asked) == {"copy": distance - 1, "induction": 1, "mqar": PAIRS}[probe]
    assert trial.tokens.max() < 256  # of the frame of a document there is nothing
    for place in trial.asked if probe != "copy" else ():
        assert (trial.tokens[:place] == trial.tokens[place - 1]).sum() == 2  # told and asked


@pytest.mark.parametrize("probe", ["passkey", "needle"])
def test_a_hidden_sentence_is_asked_for_after_the_text(probe: str) -> None:
    trial = made(probe, 100)
    said, asked = bytes(trial.tokens.tolist()).decode("latin-1").rsplit("\n", 1)
    assert said.count(asked) == 1  # the sentence with its answer
    answer = bytes(trial.tokens[trial.asked].tolist()).decode()
    assert asked.endswith(f" is{answer}")
    found = re.match(r"The pass key is \d{5}\. Remember it\.\n" if probe == "passkey" else NEEDLES_TOLD, said)
    assert found
    assert len(said) - found.end() == 100


@pytest.mark.parametrize("probe", PROBES)
def test_texts_follow_from_the_seed(probe: str) -> None:
    assert all(np.array_equal(one, other) for one, other in zip(made(probe, 50, 3), made(probe, 50, 3), strict=True))
    assert not np.array_equal(made(probe, 50, 3).tokens[:40], made(probe, 50, 4).tokens[:40])


def test_an_answer_is_right_if_it_is_the_likeliest_token(
    loaded: TrainedLanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def likeliest(trial: Trial) -> np.ndarray:
        logits, _ = predict(loaded.model, torch.tensor([[256, *trial.tokens.tolist()]]))
        return logits[0].argmax(-1).numpy()[trial.asked]

    trials = [made(probe, distance) for probe in ("induction", "mqar") for distance in (16, 40)]
    for trial in trials:
        trial.tokens[trial.asked[-1]] = likeliest(trial)[-1]
    expected = [(likeliest(trial) == trial.tokens[trial.asked]).tolist() for trial in trials]
    assert all(row[-1] for row in expected) and not all(map(all, expected))
    for piece in (7, 4096):
        monkeypatch.setattr(language_model, "PIECE", piece)
        assert [row.tolist() for row in answered(loaded.model, trials, 256)] == expected


FOUND = ProbeResult(
    "linear",
    512,
    [
        ProbeScore(probe, distance, np.array([1.0, share]), np.array([1.0, 1.0]), 0.25)
        for probe, share in (("copy", 1.0), ("induction", 0.0))
        for distance in (64, 1024)
    ],
)


def test_the_table_and_the_plot() -> None:
    assert recall_report([FOUND]).text() == (
        "linear\n"
        "  how often the likeliest token is the right one, in 2 texts each\n"
        "  distance      copy   ± induction   ±\n"
        "        64     1.000 .17     0.500 .50\n"
        "        1k     1.000 .17     0.500 .50\n"
        "    chance    0.2500        0.2500"
    )
    (panels,) = figure([FOUND]).rows
    assert [panel.title for panel in panels] == ["copy", "induction"]
    assert isinstance(panels[1], Panel) and panels[1].lines[0].y == [0.5, 0.5]


@pytest.mark.parametrize("probe", ["copy", "induction", "mqar", "passkey"])
def test_chance_is_how_often_a_guess_of_the_same_kind_is_right(probe: str) -> None:
    answers = [trial.tokens[trial.asked] for trial in (made(probe, 64, seed) for seed in range(400))]
    if probe == "passkey":  # a space; of 90,000 numbers the first digit is one of nine, the others of ten
        expected = (1 + 1 / 9 + 4 / 10) / 6
    else:
        expected = 1 / {"copy": 256, "induction": 255, "mqar": 256 - PAIRS}[probe]
    assert chance_of(answers) == pytest.approx(expected, rel=0.15)


def test_chance_is_unknown_if_no_answers_of_two_texts_agree() -> None:
    assert math.isnan(chance_of([np.array([1, 2]), np.array([2, 3])])) and math.isnan(chance_of([np.array([1])]))
    unknown = FOUND._replace(scores=[score._replace(chance=math.nan) for score in FOUND.scores])
    assert recall_report([unknown]).text().splitlines()[-1].split() == ["chance", "-", "-"]
    assert not figure([unknown]).panels[0].levels


def test_answers_that_are_all_right_or_all_wrong_have_an_error() -> None:
    """Wilson's interval of one standard error is from 0 to 1 / (n + 1), or from n / (n + 1) to 1."""
    for texts in (1, 2, 64):
        asked = np.full(texts, 8.0)
        for right in (0 * asked, asked):
            assert ProbeScore("mqar", 64, right, asked, 0.1).error == pytest.approx(1 / (texts + 1) / 2)


def test_the_command(run: Path, tmp_path: Path) -> None:
    numbers, plot = tmp_path / "numbers.json", tmp_path / "plot.png"
    words = ("--by", "recall", "--probes", "all", "--lengths", "16,32", "--texts", 3, "--json", numbers, "--plot", plot)
    done = lmlong("eval", run, *words, "--device", "cpu")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(map(len, done.stdout.splitlines()[1:])) <= 80
    (found,) = json.loads(numbers.read_text())["runs"]
    assert [at["probe"] for at in found["recall"][::2]] == list(PROBES)
    assert {at["texts"] for at in found["recall"]} == {3}
    assert plot.read_bytes().startswith(b"\x89PNG")
