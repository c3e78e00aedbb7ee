"""Default sampling of a model that loops writes no loop, wherever it is asked for a text; and the detector of loops."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from looping import write_looping_run
from loops import find_loop
from torch import Tensor

from lmlong.cli.generate import generate
from lmlong.inference.first_sample import first_sample
from lmlong.inference.loading import TrainedLanguageModel, load
from lmlong.inference.sampling import Sampler, sample_each
from lmlong.inference.session import repeat_rows
from lmlong.model.sampling_options import LOOP_PENALTY, Sampling
from lmlong.training.sample import write_sample


@pytest.fixture(scope="module")
def looping_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_looping_run(tmp_path_factory.mktemp("loops") / "looping")


@pytest.fixture(scope="module")
def loaded(looping_run: Path) -> TrainedLanguageModel:
    return load(looping_run, "cpu")


def loops(texts: list[str]) -> int:
    return sum(find_loop(text) is not None for text in texts)


def test_a_loop_is_a_unit_four_times_over_forty_characters() -> None:
    assert find_loop("to be: " + "0123456789" * 4) == "0123456789" * 4
    assert find_loop("0123456789" * 3 + "012345678") is None
    assert find_loop("ab" * 19) is None and find_loop("ab" * 20 + "c") == "ab" * 20
    assert find_loop("-" * 80 + "\n" + " " * 60) is None and find_loop("-" * 120) is not None
    assert find_loop(f"x = {' ' * 50}# 1\n") is None


def test_samples_loop_without_the_guard_alone(loaded: TrainedLanguageModel) -> None:
    seeds = range(3)
    assert loops(["".join(loaded.stream(seed=seed, loop_penalty=0)) for seed in seeds]) == 3
    assert loops(["".join(loaded.stream(seed=seed)) for seed in seeds]) == 0


def test_the_likeliest_text_is_left_alone_unless_the_guard_is_asked_for(loaded: TrainedLanguageModel) -> None:
    assert find_loop("".join(loaded.stream(temperature=0)))
    assert not find_loop("".join(loaded.stream(temperature=0, loop_penalty=LOOP_PENALTY)))


def test_a_prompt_and_what_was_read_before_may_be_repeated(loaded: TrainedLanguageModel) -> None:
    """The history of the guard begins where the text does."""
    start, rows = loaded.read("klmnopqr " * 20), [(0, row) for row in range(40)]
    begun = [""] * len(rows)
    for row, piece in loaded.generate(repeat_rows(start, len(rows)), Sampling(), rows, 11):
        begun[row] += piece
    assert begun.count("klmnopqr kl") > 30


def test_the_commands_of_a_first_visit_write_no_loop(looping_run: Path) -> None:
    """`lmlong generate RUN`, which a run names at its end, and that with a prompt and several samples."""
    for words in ([], ["--prompt", "klm", "--temperature", "0.5", "--samples", "3"]):
        done = CliRunner().invoke(generate, [str(looping_run), *words], catch_exceptions=False)
        texts = done.stdout.splitlines()
        assert all(len(text) > 100 for text in texts) and loops(texts) == 0


def test_samples_while_training_and_after_it_have_no_loop(loaded: TrainedLanguageModel, looping_run: Path) -> None:
    assert not find_loop(write_sample(loaded.model, loaded.tokenizer, 200, seed=0))
    text = first_sample(looping_run)
    assert text.startswith("klmno") and not find_loop(text)


def test_there_is_no_first_sample_of_what_cannot_be_loaded_quickly(
    looping_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert first_sample(tmp_path / "none") == ""
    monkeypatch.setattr("lmlong.inference.first_sample.LARGEST", 1000)
    assert first_sample(looping_run) == ""


def test_each_row_has_a_history_of_its_own_whatever_the_others_are() -> None:
    """As the server samples: rows with other options, which join and leave."""
    logits = torch.tensor([[0.0, 3.0, 0.0, 0.0]])
    options = [Sampling(seed=1), Sampling(seed=2, loop_penalty=2), Sampling(seed=3, loop_penalty=0), Sampling()]
    alone = [tokens_of(Sampler(option), logits, 40) for option in options]
    samplers, together = [Sampler(option) for option in options], [[] for _ in options]
    for step in range(55):
        rows = [row for row in range(4) if row <= step / 5 and len(together[row]) < 40]
        tokens = sample_each([samplers[row] for row in rows], logits.expand(len(rows), -1), [None] * len(rows))
        for row, token in zip(rows, tokens.tolist(), strict=True):
            together[row].append(token)
    assert together == alone
    assert alone[2].count(1) > alone[0].count(1) > alone[1].count(1)


def tokens_of(sampler: Sampler, logits: Tensor, count: int) -> list[int]:
    return [int(sampler(logits)) for _ in range(count)]


def test_what_is_drawn_without_the_guard_is_what_it_was() -> None:
    """The guard takes no random numbers: until a repeat, and where it is off, a seed draws the same tokens."""
    on, off = Sampler(Sampling(seed=7)), Sampler(Sampling(seed=7, loop_penalty=0))
    logits = torch.zeros(1, 100_000)
    draws = [[int(sampler(logits)) for _ in range(50)] for sampler in (on, off)]
    assert draws[0] == draws[1]
    assert draws[0][:6] == [62509, 89721, 77568, 22520, 30016, 87355]
