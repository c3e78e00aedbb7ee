"""The recall experiment: what is trained, how it is measured, what is said of it."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor

from lmlong.attention.registry import CAUSAL
from lmlong.cli.bench import bench
from lmlong.errors import UsageError
from lmlong.experiments import recall
from lmlong.experiments.recall import RecallResult, figure, study_recall, table, to_json
from lmlong.experiments.recall_grid import DEFAULT_CANDIDATES, LARGE, SMALL, RecallGrid
from lmlong.experiments.recall_model import (
    FILLER,
    TESTS,
    RecallScore,
    answers_of,
    pairs_batch,
    recall_options,
    recall_scores,
    train_recall,
)
from lmlong.model.language_model import LanguageModel
from lmlong.report.figure import Panel

TINY = RecallGrid(16, (1, 2), 4, (8,), (1e-2, 1e-3), steps=2, queries=8)
WORDS = ["--pairs", "1,2", "--vocabulary", "16", "--widths", "8,16", "--steps", "2", "--rates", "1e-2"]


def looked_up(tokens: Tensor) -> Tensor:
    """Answers every key with what first followed it, reading a row as anyone would."""
    answers = torch.full_like(tokens, FILLER)
    for row, written in zip(tokens.tolist(), answers, strict=True):
        for place, token in enumerate(row):
            written[place] = row[row.index(token) + 1] if row.index(token) + 1 < len(row) else FILLER
    return answers


def test_one_who_looks_up_recalls_all_and_one_who_never_answers_nothing() -> None:
    everything = recall_scores(looked_up, SMALL, seed=0)
    assert {pairs: score.accuracy for pairs, score in everything.items()} == {4: 1.0, 8: 1.0, 16: 1.0}
    assert everything[8].asked == TESTS * SMALL.queries
    assert all(score.right == 0 for score in recall_scores(torch.zeros_like, SMALL, seed=0).values())


def test_tests_are_rows_no_step_of_training_held() -> None:
    seen = {tuple(row) for step in range(50) for row in pairs_batch(SMALL, 4, 0, step).tokens.tolist()}
    met: list[Tensor] = []

    def silent(tokens: Tensor) -> Tensor:
        met.append(tokens)
        return torch.zeros_like(tokens)

    recall_scores(silent, SMALL._replace(steps=50, pairs=(4,)), seed=0)
    assert len(met) == TESTS and not seen & {tuple(row) for tokens in met for row in tokens.tolist()}


@pytest.mark.parametrize("name", DEFAULT_CANDIDATES)
def test_states_are_as_wide_as_the_model(name: str) -> None:
    numbers = {}
    for width in (16, 64):
        options = recall_options(name, width)
        kind = options.attention.kind
        assert isinstance(kind, str) and options.heads == 1 and options.layers == 2
        numbers[width] = CAUSAL[kind](1, width, width, options.attention).state_numbers(64)
    if name in ("elu", "elu-learned"):
        assert numbers == {16: 16 * 17, 64: 64 * 65}
    if name == "window":  # as near to linear attention's as whole tokens allow
        assert 0 <= 16 * 17 - numbers[16] < 33 and 0 <= 64 * 65 - numbers[64] < 129


def test_training_is_a_function_of_the_seed() -> None:
    def weights(seed: int) -> list[Tensor]:
        return list(train_recall(TINY, recall_options("favor", 8), 1e-2, seed).parameters())

    before = torch.get_rng_state()
    first = weights(0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)  # what others draw does not matter
    assert all(map(torch.equal, first, weights(0)))
    assert not all(map(torch.equal, first, weights(1)))


def test_a_model_learns_to_recall() -> None:
    grid = RecallGrid(12, (2,), 4, (32,), (1e-2,), steps=120, queries=128)
    model = train_recall(grid, recall_options("softmax", 32), 1e-2, seed=0)
    (score,) = recall_scores(lambda tokens: answers_of(model, tokens), grid, seed=0).values()
    assert score.accuracy > 0.95
    fresh = LanguageModel(recall_options("softmax", 32), 12)
    (score,) = recall_scores(lambda tokens: answers_of(fresh, tokens), grid, seed=0).values()
    assert score.accuracy < 0.5


def test_the_best_rate_is_kept_and_nothing_trained_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best, runs = study_recall(TINY, ["elu", "softmax"], 0, tmp_path)
    assert [(run.candidate, run.rate) for run in runs] == [
        ("elu", 1e-2), ("elu", 1e-3), ("softmax", 1e-2), ("softmax", 1e-3)
    ]  # fmt: skip
    assert best == [max(runs[:2], key=lambda run: run.mean), max(runs[2:], key=lambda run: run.mean)]
    monkeypatch.setattr(recall, "train_recall", None)
    assert study_recall(TINY, ["elu", "softmax"], 0, tmp_path) == (best, runs)
    with pytest.raises(TypeError):
        study_recall(TINY._replace(steps=3), ["elu"], 0, tmp_path)  # other settings are another model


def test_rates_are_tried_until_one_recalls_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scored(accuracies: Sequence[int]) -> list[float]:
        left = iter(accuracies)
        monkeypatch.setattr(
            recall, "recall_scores", lambda *_: {1: RecallScore(next(left), 10), 2: RecallScore(10, 10)}
        )
        grid = TINY._replace(rates=(0.1, 0.2, 0.3))
        best, runs = study_recall(grid, ["elu"], 0, tmp_path / str(len(accuracies)))
        assert best == [max(runs, key=lambda run: run.mean)]
        return [run.rate for run in runs]

    assert scored([3, 10]) == [0.1, 0.2]
    assert scored([3, 9, 8]) == [0.1, 0.2, 0.3]


def test_the_table_shows_a_line_for_each_model() -> None:
    scores = {4: RecallScore(1000, 1000), 16: RecallScore(333, 1000), 128: RecallScore(0, 10)}
    lines = table([RecallResult("softmax-features", 128, 0.0005, 0, 10_224, 1_500_000, scores)]).splitlines()
    assert lines[1].split() == ["attention", "width", "state", "rate", "4", "16", "128"]
    assert lines[2].split() == ["softmax-features", "128", "1.4", "MiB", "0.0005", "1.000", "0.333", "0.000"]
    six = {pairs: RecallScore(1, 3) for pairs in LARGE.pairs} | {128: RecallScore(1, 3)}
    wide = table([RecallResult("softmax-features", 128, 0.0005, 0, 10_224, 1_500_000, six)])
    assert max(map(len, wide.splitlines())) <= 80


def test_the_plot_has_a_panel_for_each_width_and_a_line_for_each_candidate() -> None:
    few, many = RecallScore(9, 10), RecallScore(1, 10)
    best = [
        RecallResult(name, width, 0.001, 0, 10_224, 1_500_000, {4: few, 64: many})
        for name in ("delta", "elu")
        for width in (32, 64)
    ]
    ((narrow, wide),) = figure(best).rows
    assert isinstance(narrow, Panel) and isinstance(wide, Panel) and wide.title == "width 64"
    assert [(line.label, line.x, line.y) for line in wide.lines] == [
        ("delta", [4, 64], [0.9, 0.1]),
        ("elu", [4, 64], [0.9, 0.1]),
    ]


def run(*words: str) -> Result:
    return CliRunner().invoke(bench, ["recall", *words])


def test_the_command_tabulates_and_writes_json(tmp_path: Path) -> None:
    numbers, out = tmp_path / "recall.json", tmp_path / "out"
    done = run(*WORDS, "--only", "elu,favor", "--out", str(out), "--json", str(numbers))
    assert done.exit_code == 0, done.output
    assert [line.split()[:2] for line in done.stdout.splitlines()[2:]] == [
        ["elu", "8"], ["elu", "16"], ["favor", "8"], ["favor", "16"]
    ]  # fmt: skip
    assert len(done.stderr.splitlines()) == 4
    written = json.loads(numbers.read_text())
    assert [(line["candidate"], line["width"]) for line in written] == [
        ("elu", 8), ("elu", 16), ("favor", 8), ("favor", 16)
    ]  # fmt: skip
    assert [score["asked"] for score in written[0]["scores"]] == [TESTS * SMALL.queries] * 2
    shown = [float(word) for word in done.stdout.splitlines()[2].split()[-2:]]
    assert shown == [round(score["right"] / score["asked"], 3) for score in written[0]["scores"]]
    again = run(*WORDS, "--only", "elu,favor", "--out", str(out))
    assert (again.stdout, again.stderr) == (done.stdout, "")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--pairs", "4,40"], "--vocabulary: of 64 tokens 31 can be keys, too few for 40 pairs. Give 82 or more"),
        (["--pairs", "4,x"], "--pairs: '4,x' is not a list of numbers. Write it like 8,16."),
        (["--pairs", "0,4"], "--pairs: 0 cannot be used. Give numbers above 0."),
        (["--widths", "-8"], "--widths: -8 cannot be used"),
        (["--rates", "nan"], "--rates: nan cannot be used"),
        (["--only", "softmux"], "--only: there is no 'softmux'. Did you mean 'softmax'?"),
        (["--only", "elu,elu-learned-window"], "--only: 'elu-learned-window' is a pattern of 4 layers"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(words: list[str], complaint: str, tmp_path: Path) -> None:
    done = run(*words, "--out", str(tmp_path / "out"))
    assert isinstance(done.exception, UsageError)
    assert complaint in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_a_remedy_works() -> None:
    with pytest.raises(UsageError) as refused:
        SMALL._replace(pairs=(40,)).check()
    (enough,) = re.findall(r"Give (\d+) or more", str(refused.value))
    SMALL._replace(pairs=(40,), vocabulary=int(enough)).check()
    LARGE.check()


def test_results_are_plain_values() -> None:
    run = RecallResult("elu", 8, 0.01, 0, 100, 200, {4: RecallScore(1, 2)})
    assert json.loads(json.dumps(to_json(run)))["scores"] == [{"pairs": 4, "right": 1, "asked": 2}]
