"""Linformer against full attention: the perplexity of hidden words, and the recall of tokens half a text before."""

import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from lmlong.experiments.kept_results import KeptResult
from lmlong.experiments.slots_data import TESTS, MaskedBatch, MaskedTask, encoder_options, task_of
from lmlong.experiments.slots_grid import COPYING, EncoderSetting, SlotsGrid, encoder_settings
from lmlong.experiments.trainer import fit, seeded
from lmlong.model.encoder import Encoder
from lmlong.model.loss import IGNORED
from lmlong.report.json_values import json_keys

LEARNING_RATE = 4e-3


@json_keys("*setting", "seconds", "hidden", "nats", "right", "nats_per_token", "perplexity", "accuracy")
class EncoderResult(NamedTuple):
    """The loss and the right answers of one encoder on hidden tokens, by block of the test."""

    setting: EncoderSetting
    seconds: float  # of training
    hidden: list[int]
    nats: list[float]
    right: list[int]

    @property
    def nats_per_token(self) -> float:
        return sum(self.nats) / sum(self.hidden)

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats_per_token)

    @property
    def accuracy(self) -> float:
        return sum(self.right) / sum(self.hidden)

    def above(self, other: "EncoderResult") -> tuple[float, float]:
        """Return by how many nats per token this exceeds another on the same tokens, and its standard error."""
        pairs = zip(self.nats, other.nats, self.hidden, strict=True)
        differences = [(nats - of_other) / hidden for nats, of_other, hidden in pairs]
        return self.nats_per_token - other.nats_per_token, statistics.stdev(differences) / len(differences) ** 0.5


def study_slots(grid: SlotsGrid, out: Path) -> dict[EncoderSetting, EncoderResult]:
    """Return the results of all encoders; results kept in `out` are not trained again."""
    results = {}
    with tqdm(encoder_settings(grid), leave=False, disable=None) as bar:
        for setting in bar:
            bar.set_description(setting.name)
            results[setting] = trained_encoder(grid, setting, out)
    return results


def trained_encoder(grid: SlotsGrid, setting: EncoderSetting, out: Path) -> EncoderResult:
    """Train and test an encoder, unless `out` holds its result for the same settings."""
    task = task_of(setting, grid.seed)
    settings = {
        "setting": setting._asdict(),
        "model": encoder_options(setting, grid.width).model_dump(),
        "steps": grid.steps,
        "seed": grid.seed,
        "rate": LEARNING_RATE,
        "text": task.identity,
    }

    def train_and_score() -> dict[str, Any]:
        begun = time.perf_counter()
        model = train_encoder(grid, setting, task)
        seconds = time.perf_counter() - begun
        blocks = [score_block(model, task.test(number)) for number in range(TESTS)]
        sums = {name: [getattr(block, name) for block in blocks] for name in BlockScore._fields}
        result = EncoderResult(setting, seconds, **sums)
        score = f"perplexity {result.perplexity:.1f}" if setting.task == "words" else f"{result.accuracy:.3f} recalled"
        print(f"{setting.name}: {score}, {result.seconds:.0f} s", file=sys.stderr)
        return {"seconds": seconds, **sums}

    return EncoderResult(setting, **KeptResult(out, setting.name, settings).get(train_and_score))


def train_encoder(grid: SlotsGrid, setting: EncoderSetting, task: MaskedTask) -> Encoder:
    """Return a trained encoder."""
    options = encoder_options(setting, grid.width)
    model = seeded(grid.seed, lambda: Encoder(options, task.vocabulary, setting.length))
    steps = grid.steps * (COPYING if setting.task == "copies" else 1)
    fit(model, lambda step: [task.step(step)], steps, LEARNING_RATE, bar_row=1)
    return model.eval()


class BlockScore(NamedTuple):
    hidden: int
    nats: float  # the loss on the hidden tokens
    right: int  # of them were found likeliest


@torch.no_grad()
def score_block(model: Encoder, block: MaskedBatch) -> BlockScore:
    """Score a model on the hidden tokens of one block."""
    tokens, targets = (part.to(model.embedding.weight.device) for part in block)
    hidden = targets != IGNORED
    log_p, answers = model.logits(model.hidden_states(tokens)[hidden]).log_softmax(-1), targets[hidden]
    nats = -log_p.gather(1, answers[:, None]).cpu().sum(dtype=torch.float64)
    return BlockScore(len(answers), float(nats), int((log_p.argmax(-1) == answers).sum()))
