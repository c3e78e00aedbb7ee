"""Default sampling of a model that loops writes no loop, wherever it is asked for a text; and the detector of loops."""

import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from models import save_run

from lmlong import recipe
from lmlong.cli.generate import generate
from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.inference.loading import TrainedLanguageModel, load
from lmlong.inference.samples import first_sample
from lmlong.inference.sampling import Sampler, sample
from lmlong.model.language_model import LanguageModel
from lmlong.model.sampling_options import LOOP_PENALTY, Sampling
from lmlong.recipe import Attention, Model, Recipe, Text, Training
from lmlong.training.callbacks import write_sample

CYCLE = "klmnopqr "
LETTERS = "abcdefghijklmnopqrstuvwxyz .,"
WIDTH = 260
"""A direction for each byte, and both ends of a document."""


def write_looping_run(folder: Path) -> Path:
    """Write a run folder of a model whose likeliest text is a cycle of letters, by far; any other letter may come."""
    tokenizer = ByteTokenizer()
    options = Model(width=WIDTH, layers=1, heads=2, tied_output=False, attention=Attention(kind="linear"))
    made = Recipe(text=Text(tokenizer=recipe.Tokenizer(kind="bytes")), model=options, training=Training(steps=1))
    model = LanguageModel(options, tokenizer.vocabulary)
    logits = torch.full((tokenizer.vocabulary, WIDTH), -9.0)
    logits[list(LETTERS.encode())] = 0.0
    logits[ord(CYCLE[0])] = 4.0
    for now, following in zip(CYCLE.encode(), (CYCLE[1:] + CYCLE[0]).encode(), strict=True):
        logits[ord(CYCLE[0]), now] = 0.0
        logits[following, now] = 9.0
    weights = model.state_dict()
    for name, weight in weights.items():
        if name.endswith("out_proj.weight"):
            weight.zero_()  # blocks add nothing: what comes next depends on the last token alone
    weights["embedding.weight"].copy_(torch.eye(tokenizer.vocabulary, WIDTH))
    weights["lm_head.output.weight"].copy_(logits / WIDTH**0.5)  # the norm makes it 1 again
    return save_run(folder, made, model, tokenizer)


LOOP = re.compile(r"(?=((.+?)\2{3,}))", re.DOTALL)
"""The same at least four times."""


def find_loop(text: str) -> str | None:
    """Return a loop in a text: its unit repeated over 40 characters, which real text hardly has; a character alone over
    120, for fewer are indentation or a rule."""
    for found, unit in LOOP.findall(text):
        if len(found) >= (40 if len(set(unit)) > 1 else 120):
            return found
    return None


@pytest.fixture(scope="module")
def looping_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_looping_run(tmp_path_factory.mktemp("loops") / "looping")


@pytest.fixture(scope="module")
def loaded(looping_run: Path) -> TrainedLanguageModel:
    return load(looping_run, "cpu")


def loops(texts: list[str]) -> int:
    return sum(find_loop(text) is not None for text in texts)


def test_samples_loop_without_the_guard_alone(loaded: TrainedLanguageModel) -> None:
    seeds = range(3)
    assert loops(["".join(loaded.stream(seed=seed, loop_penalty=0)) for seed in seeds]) == 3
    assert loops(["".join(loaded.stream(seed=seed)) for seed in seeds]) == 0


def test_greedy_text_may_loop_unless_a_penalty_is_set(loaded: TrainedLanguageModel) -> None:
    assert find_loop("".join(loaded.stream(temperature=0)))
    assert not find_loop("".join(loaded.stream(temperature=0, loop_penalty=LOOP_PENALTY)))


def test_a_prompt_and_what_was_read_before_may_be_repeated(loaded: TrainedLanguageModel) -> None:
    """The history of the guard begins where the text does."""
    start, rows = loaded.read("klmnopqr " * 20), [(0, row) for row in range(40)]
    begun = [""] * len(rows)
    for row, piece in loaded.generate([start] * len(rows), Sampling(), rows, 11):
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


def test_a_large_or_missing_run_has_no_first_sample(
    looping_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert first_sample(tmp_path / "none") == ""
    monkeypatch.setattr("lmlong.inference.samples.LARGEST", 1000)
    assert first_sample(looping_run) == ""


def test_the_guard_takes_no_random_numbers() -> None:
    """Until a repeat, and where it is off, a seed draws the same tokens."""
    on, off = Sampler(Sampling(seed=7)), Sampler(Sampling(seed=7, loop_penalty=0))
    logits = torch.zeros(1, 100_000)
    draws = [[sample([sampler], logits)[0] for _ in range(50)] for sampler in (on, off)]
    assert draws[0] == draws[1]
    assert draws[0][:6] == [62509, 89721, 77568, 22520, 30016, 87355]
