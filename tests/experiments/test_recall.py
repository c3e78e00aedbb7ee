"""The recall experiment: what is trained, how it is measured, what is said of it."""

import json
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
from lmlong.experiments.recall import RecallResult, figure, study_recall, table
from lmlong.experiments.recall_grid import LARGE, SMALL, RecallGrid
from lmlong.experiments.recall_model import (
    FILLER,
    TESTS,
    RecallScore,
    answers_of,
    keys,
    make_batch,
    pairs_batch,
    recall_options,
    recall_scores,
    train_recall,
    values,
)
from lmlong.model.language_model import LanguageModel
from lmlong.model.loss import IGNORED
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


def test_only_answers_to_queries_count() -> None:
    asked = TESTS * SMALL.queries
    assert recall_scores(looked_up, SMALL, seed=0) == [RecallScore(pairs, asked, asked) for pairs in SMALL.pairs]
    nothing = recall_scores(lambda tokens: torch.full_like(tokens, IGNORED), SMALL, seed=0)
    assert nothing == [RecallScore(pairs, 0, asked) for pairs in SMALL.pairs]


def test_tests_are_rows_no_step_of_training_held() -> None:
    seen = {tuple(row) for step in range(50) for row in pairs_batch(SMALL, 4, 0, step).tokens.tolist()}
    met: list[Tensor] = []

    def silent(tokens: Tensor) -> Tensor:
        met.append(tokens)
        return torch.zeros_like(tokens)

    recall_scores(silent, SMALL._replace(steps=50, pairs=(4,)), seed=0)
    assert len(met) == TESTS and not seen & {tuple(row) for tokens in met for row in tokens.tolist()}


def test_the_state_of_linear_attention_is_as_wide_as_the_model_and_that_of_a_window_about_as_large() -> None:
    def state_numbers(name: str, width: int) -> int:
        options = recall_options(name, width)
        assert isinstance(options.attention.kind, str)
        return CAUSAL[options.attention.kind](1, width, width, options.attention).state_numbers(64)

    for width in (16, 64):
        assert state_numbers("elu", width) == state_numbers("elu-learned", width) == width * (width + 1)
        assert 0 <= width * (width + 1) - state_numbers("window", width) <= 2 * width  # less than a token


@pytest.mark.parametrize(("pairs", "length", "vocabulary"), [(1, 4, 4), (4, 50, 12), (31, 124, 64)])
def test_every_key_is_told_once_and_asked_once(pairs: int, length: int, vocabulary: int) -> None:
    questions = make_batch(20, pairs, length, vocabulary, seed=0, step=0)
    assert sorted([FILLER, *keys(vocabulary), *values(vocabulary)]) == list(range(vocabulary))
    assert questions.tokens.shape == questions.targets.shape == (20, length)
    for tokens, targets in zip(questions.tokens, questions.targets, strict=True):
        memory = dict(tokens[: 2 * pairs].view(pairs, 2).tolist())
        assert len(memory) == len(set(memory.values())) == pairs
        assert set(memory) <= set(keys(vocabulary)) and set(memory.values()) <= set(values(vocabulary))
        asked = targets != IGNORED
        assert not asked[: 2 * pairs].any()
        assert sorted(tokens[asked].tolist()) == sorted(memory)
        assert [memory[key] for key in tokens[asked].tolist()] == targets[asked].tolist()
        assert (tokens[2 * pairs :][~asked[2 * pairs :]] == FILLER).all()
        assert not (asked[1:] & asked[:-1]).any()  # what follows a query is a filler


def test_keys_and_values_are_drawn_evenly() -> None:
    tokens = make_batch(4000, 4, 16, 64, seed=0, step=0).tokens
    for place, drawn in ((0, keys(64)), (6, keys(64)), (1, values(64)), (7, values(64))):
        counts = tokens[:, place].bincount(minlength=64)[list(drawn)]
        assert counts.sum() == 4000
        assert counts.min() > 80 and counts.max() < 180  # 125 or 129 are expected, with a deviation of 11


def test_queries_are_as_rare_as_they_are_far() -> None:
    places = (make_batch(20_000, 1, 66, 64, seed=0, step=0).targets != IGNORED).sum(0)[2::2].double()
    weights = torch.arange(1, 33, dtype=torch.float64) ** -0.99
    expected = 20_000 * weights / weights.sum()
    assert ((places - expected).abs() < 5 * expected.sqrt()).all()


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
    (score,) = recall_scores(lambda tokens: answers_of(model, tokens), grid, seed=0)
    assert score.accuracy > 0.95
    fresh = LanguageModel(recall_options("softmax", 32), 12)
    (score,) = recall_scores(lambda tokens: answers_of(fresh, tokens), grid, seed=0)
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
            recall, "recall_scores", lambda *_: [RecallScore(1, next(left), 10), RecallScore(2, 10, 10)]
        )
        grid = TINY._replace(rates=(0.1, 0.2, 0.3))
        best, runs = study_recall(grid, ["elu"], 0, tmp_path / str(len(accuracies)))
        assert best == [max(runs, key=lambda run: run.mean)]
        return [run.rate for run in runs]

    assert scored([3, 10]) == [0.1, 0.2]
    assert scored([3, 9, 8]) == [0.1, 0.2, 0.3]


def test_the_table_shows_a_line_for_each_model() -> None:
    scores = [RecallScore(4, 1000, 1000), RecallScore(16, 333, 1000), RecallScore(128, 0, 10)]
    lines = table([RecallResult("softmax-features", 128, 0.0005, 0, 10_224, 1_500_000, scores)]).splitlines()
    assert lines[1].split() == ["attention", "width", "state", "rate", "4", "16", "128"]
    assert lines[2].split() == ["softmax-features", "128", "1.4", "MiB", "0.0005", "1.000", "0.333", "0.000"]
    six = [RecallScore(pairs, 1, 3) for pairs in (*LARGE.pairs, 128)]
    wide = table([RecallResult("softmax-features", 128, 0.0005, 0, 10_224, 1_500_000, six)])
    assert max(map(len, wide.splitlines())) <= 80


def test_the_plot_has_a_panel_for_each_width_and_a_line_for_each_candidate() -> None:
    scores = [RecallScore(4, 9, 10), RecallScore(64, 1, 10)]
    best = [
        RecallResult(name, width, 0.001, 0, 10_224, 1_500_000, scores)
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


def test_the_sizes_of_the_paper_can_be_built() -> None:
    LARGE.check()
