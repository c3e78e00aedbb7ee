"""What slots are worth: which encoders are trained, on what, how they are scored, what is said of it."""

import json
import math
from itertools import product
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from lmlong.cli.bench import bench
from lmlong.errors import UsageError
from lmlong.experiments import slots
from lmlong.experiments.slots import EncoderResult, figure, score_block, table, train_encoder
from lmlong.experiments.slots_data import SYMBOLS, TESTS, MaskedBatch, copies, encoder_options, words
from lmlong.experiments.slots_grid import AT_ONCE, DEFAULT, SHARINGS, EncoderSetting, SlotsGrid, encoder_settings
from lmlong.model.encoder import Encoder
from lmlong.model.loss import IGNORED
from lmlong.report.plot import draw

TINY = SlotsGrid(slots=(2, 4), lengths=(64, 128), copies=(8,), steps=1, width=8)
WORDS = ["--slots", "2,4", "--lengths", "64,128", "--copies", "8", "--steps", "1", "--width", "8"]


def made_up(setting: EncoderSetting) -> EncoderResult:
    """One nat a token with full attention, a tenth more for each halving of 256 slots; half of 20 tokens right."""
    nats = 1.0 if setting.slots is None else 1 + math.log2(256 / setting.slots) / 10
    return EncoderResult(setting, 1.0, [10, 10], [10 * nats, 10 * nats + (setting.slots is not None)], [4, 6])


FOUND = {setting: made_up(setting) for setting in encoder_settings(DEFAULT)}


def test_every_comparison_has_its_encoders_and_none_is_trained_twice() -> None:
    DEFAULT.check()
    chosen = encoder_settings(DEFAULT)
    assert len(set(chosen)) == len(chosen) == len({setting.name for setting in chosen})
    in_words = {setting for setting in chosen if setting.task == "words"}
    shortest = DEFAULT.lengths[0]
    assert {EncoderSetting("words", shortest, k) for k in (None, *DEFAULT.slots)} < in_words
    assert {EncoderSetting("words", shortest, DEFAULT.fixed, sharing) for sharing in SHARINGS} < in_words
    assert {EncoderSetting("words", n, k) for n, k in product(DEFAULT.lengths, (None, DEFAULT.fixed))} < in_words
    assert all(s.slots is None or s.slots <= s.length for s in chosen)


def test_a_copy_can_be_told_from_half_a_text_back_and_from_nowhere_else() -> None:
    tokens, targets = copies(64, 0).step(3)
    assert tokens.shape == (AT_ONCE // 64, 64)
    asked = targets != IGNORED
    assert not asked[:, :32].any() and 0.4 < asked[:, 32:].float().mean() < 0.6
    assert (tokens[asked] == SYMBOLS).all() and (tokens[~asked] < SYMBOLS).all()
    assert (tokens[:, :32][asked[:, 32:]] == targets[asked]).all()
    assert (tokens[:, :32] == tokens[:, 32:])[~asked[:, 32:]].all()
    counts = targets[asked].bincount(minlength=SYMBOLS)
    assert counts.min() > 0.5 * counts.sum() / SYMBOLS  # all alike likely


def test_the_same_words_are_hidden_at_every_length() -> None:
    short, long = (words(length, 0).test(1) for length in (64, 512))
    assert torch.equal(short.tokens.flatten(), long.tokens.flatten())
    assert torch.equal(short.targets.flatten(), long.targets.flatten())
    assert 0.12 < (short.targets != IGNORED).float().mean() < 0.18


def test_batches_follow_from_the_seed_and_tests_are_apart() -> None:
    for task in (copies, words):
        first = task(64, 0).step(0)
        assert torch.equal(first.tokens, task(64, 0).step(0).tokens)
        others = [task(64, 1).step(0), task(64, 0).step(1), *(task(64, 0).test(number) for number in range(TESTS))]
        assert not any(torch.equal(first.tokens, other.tokens) for other in others)


def test_a_score_is_of_hidden_tokens_alone() -> None:
    model = Encoder(encoder_options(EncoderSetting("copies", 8, None), 8), SYMBOLS, 8)
    torch.nn.init.zeros_(model.embedding.weight)  # so that all tokens are alike likely
    targets = torch.tensor([[IGNORED, 3, IGNORED, 0, IGNORED, IGNORED, IGNORED, 0]])
    found = score_block(model, MaskedBatch(torch.zeros(1, 8, dtype=torch.long), targets))
    assert found.hidden == 3 and found.nats == pytest.approx(3 * math.log(SYMBOLS))
    assert found.right == 2  # the first of what is alike likely


def test_full_attention_learns_to_copy() -> None:
    setting, task = EncoderSetting("copies", 8, None), copies(8, 0)
    block = score_block(train_encoder(SlotsGrid(steps=20, width=32), setting, task), task.test(0))
    assert block.right > 0.9 * block.hidden


def test_more_than_another_is_by_block() -> None:
    mine = EncoderResult(EncoderSetting("words", 8, 2), 1.0, [10, 10], [15.0, 25.0], [0, 5])
    other = EncoderResult(EncoderSetting("words", 8, None), 1.0, [10, 10], [10.0, 10.0], [10, 10])
    assert mine.above(other) == (1.0, pytest.approx(0.5))  # 0.5 and 1.5 more
    assert (mine.nats_per_token, mine.perplexity, mine.accuracy) == (2.0, math.exp(2), 0.25)


def test_the_tables_show_every_comparison() -> None:
    text = table(DEFAULT, FOUND)
    lines = [line.split() for line in text.splitlines()]
    assert ["full", "2.72", "1.0000"] in lines
    assert ["k", "=", "64", "headwise", "3.49", "1.2500", "+0.2500", "0.0500"] in lines
    assert ["k", "=", "64", "layerwise", "3.49", "1.2500", "+0.2500", "0.0500"] in lines
    assert ["4,096", "2.72", "3.49", "+0.2500", "0.0500"] in lines
    assert ["128", "64", *["0.500"] * 3] in lines and ["256", "128", *["0.500"] * 4] in lines
    assert max(map(len, text.splitlines())) <= 80


def test_the_chart_has_a_panel_for_each_question() -> None:
    by_slots, by_length, copied = draw(figure(DEFAULT, FOUND)).axes
    assert list(by_slots.lines[0].get_xdata()) == list(DEFAULT.slots)
    assert [line.get_label() for line in by_length.lines] == ["full", "k = 64"]
    lines = {line.get_label(): list(line.get_xdata()) for line in copied.lines}
    assert lines["full"] == [64, 128, 256] and lines["k = 256"] == [256]


def run(*given: str) -> Result:
    return CliRunner().invoke(bench, ["slots", *given])


def test_the_command_tabulates_draws_and_writes_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, plot = tmp_path / "slots.json", tmp_path / "slots.png"
    done = run(*WORDS, "--out", str(tmp_path / "out"), "--json", str(numbers), "--plot", str(plot))
    assert done.exit_code == 0, done.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    written = json.loads(numbers.read_text())
    assert len(written) == len(encoder_settings(TINY)) == len(done.stderr.splitlines())
    first = written[0]
    assert (first["task"], first["length"], first["slots"]) == ("words", 64, None)
    assert first["perplexity"] == pytest.approx(math.exp(sum(first["nats"]) / sum(first["hidden"])))
    assert f"{first['perplexity']:.2f}" in done.stdout
    monkeypatch.setattr(slots, "train_encoder", None)
    again = run(*WORDS, "--out", str(tmp_path / "out"))
    assert (again.stdout, again.stderr) == (done.stdout, "")  # nothing is trained twice
    assert isinstance(run(*WORDS, "--seed", "1", "--out", str(tmp_path / "out")).exception, TypeError)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (["--slots", "0,2"], "--slots: 0 cannot be used. Give numbers above 0."),
        (["--slots", "65"], "--slots: 65 are more than the 64 tokens of the shortest text"),
        (["--lengths", "96"], "--lengths: 96 tokens cannot be used. Give powers of 2, from 8 to 4,096."),
        (["--copies", "4"], "--copies: 4 tokens cannot be used"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(given: list[str], complaint: str, tmp_path: Path) -> None:
    done = run(*WORDS, *given, "--out", str(tmp_path / "out"))
    assert isinstance(done.exception, UsageError), done.output
    assert complaint in str(done.exception)
    assert not (tmp_path / "out").exists()
