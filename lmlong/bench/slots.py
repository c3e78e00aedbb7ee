"""What shortening to k slots costs: the perplexity of hidden words, and the recall of what stands half a text away."""

import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from lmlong import recipe
from lmlong.bench.kept import Kept
from lmlong.bench.slots_data import TESTS, Hidden, Task, model_options, task_of
from lmlong.bench.slots_grid import COPYING, Grid, Setting, settings
from lmlong.model.device import pick_device
from lmlong.model.encoder import Encoder
from lmlong.model.loss import IGNORED
from lmlong.training.optimizer import make_optimizer, make_schedule

RATE = 4e-3


class Trained(NamedTuple):
    """One encoder and what it knows of the tokens that were hidden, by block of the test."""

    setting: Setting
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

    def above(self, other: "Trained") -> tuple[float, float]:
        """Nats per token more than another loses on the same tokens, and the standard error of that over the blocks."""
        pairs = zip(self.nats, other.nats, self.hidden, strict=True)
        differences = [(mine - theirs) / hidden for mine, theirs, hidden in pairs]
        return self.nats_per_token - other.nats_per_token, statistics.stdev(differences) / len(differences) ** 0.5


def study(grid: Grid, out: Path) -> dict[Setting, Trained]:
    """All encoders; what `out` holds already is not trained again."""
    chosen = settings(grid)
    found = {}
    with tqdm(chosen, leave=False, disable=None) as bar:
        for setting in bar:
            bar.set_description(setting.name)
            found[setting] = trained(grid, setting, out)
    return found


def trained(grid: Grid, setting: Setting, out: Path) -> Trained:
    """Train and test an encoder, unless `out` holds what came of it with the same settings."""
    task = task_of(setting, grid.seed)
    made_of = {
        "setting": setting._asdict(),
        "model": model_options(setting, grid.width).model_dump(),
        "steps": grid.steps,
        "seed": grid.seed,
        "rate": RATE,
        "text": task.identity,
    }

    def made() -> dict[str, Any]:
        begun = time.perf_counter()
        model = train(grid, setting, task)
        seconds = time.perf_counter() - begun
        blocks = [score(model, task.test(number)) for number in range(TESTS)]
        sums = ([getattr(block, name) for block in blocks] for name in ("hidden", "nats", "right"))
        result = Trained(setting, seconds, *sums)
        found = f"perplexity {result.perplexity:.1f}" if setting.task == "words" else f"{result.accuracy:.3f} recalled"
        print(f"{setting.name}: {found}, {result.seconds:.0f} s", file=sys.stderr)
        return _numbers(result)

    return Trained(setting, **Kept(out, setting.name, made_of).get(made))


def train(grid: Grid, setting: Setting, task: Task) -> Encoder:
    """An encoder after all its steps, in float32."""
    steps = grid.steps * (COPYING if setting.task == "copies" else 1)
    device = pick_device("auto")
    with torch.random.fork_rng():
        torch.manual_seed(grid.seed)
        model = Encoder(model_options(setting, grid.width), task.vocabulary, setting.length).to(device)
    course = recipe.Training(steps=steps, learning_rate=RATE, warmup_steps=max(steps // 10, 1))
    optimizer = make_optimizer(model, course)
    schedule = make_schedule(optimizer, course, steps)
    for step in tqdm(range(steps), leave=False, disable=None, position=1):
        optimizer.zero_grad()
        tokens, targets = (part.to(device) for part in task.step(step))
        nats, _ = model.lose(tokens, targets)
        (nats / (targets != IGNORED).sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), course.clip)
        optimizer.step()
        schedule.step()
    return model.eval()


class Score(NamedTuple):
    hidden: int
    nats: float  # that the hidden tokens cost
    right: int  # of them were found likeliest


@torch.no_grad()
def score(model: Encoder, block: Hidden) -> Score:
    """What a model knows of the hidden tokens of one block."""
    tokens, targets = (part.to(model.embedding.weight.device) for part in block)
    asked = targets != IGNORED
    chances, wanted = model.logits(model.read(tokens)[asked]).log_softmax(-1), targets[asked]
    lost = -chances.gather(1, wanted[:, None]).sum(dtype=torch.float64)
    return Score(len(wanted), float(lost), int((chances.argmax(-1) == wanted).sum()))


def plain(found: Sequence[Trained]) -> list[dict[str, Any]]:
    """Every encoder's sums and counts, by block, and the ratios made of them."""
    return [
        {
            **each.setting._asdict(),
            **_numbers(each),
            "nats_per_token": each.nats_per_token,
            "perplexity": each.perplexity,
            "accuracy": each.accuracy,
        }
        for each in found
    ]


def _numbers(each: Trained) -> dict[str, Any]:
    return {name: value for name, value in each._asdict().items() if name != "setting"}
