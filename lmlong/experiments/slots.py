"""Linformer against full attention: the perplexity of hidden words, and the recall of tokens half a text before."""

import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lmlong.experiments.kept_results import KeptResult
from lmlong.experiments.slots_data import SYMBOLS, TESTS, MaskedBatch, MaskedTask, encoder_options, task_of
from lmlong.experiments.slots_grid import COPYING, SHARINGS, EncoderSetting, SlotsGrid, encoder_settings
from lmlong.experiments.trainer import fit, seeded
from lmlong.model.encoder import Encoder
from lmlong.model.loss import IGNORED
from lmlong.recipe import Masking
from lmlong.report.figure import Figure, Level, Line, Panel, Style, lines_of, style
from lmlong.report.json_values import json_keys
from lmlong.report.progress import Progress
from lmlong.report.table import Column, format_rows, format_table, pivot_rows, with_error

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
    settings = list(encoder_settings(grid))
    with Progress("encoders", len(settings), "encoders") as progress:
        for setting in settings:
            results[setting] = trained_encoder(grid, setting, out)
            progress.update()
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
    fit(model, lambda step: [task.step(step)], steps, LEARNING_RATE, setting.name)
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


Results = Mapping[EncoderSetting, EncoderResult]

ABOVE_FULL = Column("above full", 12, "+.4f")


def table(grid: SlotsGrid, results: Results) -> str:
    """Return for an 80-column terminal: words by slots, by sharing and by length, then copies."""
    hidden = f"{Masking().share:.0%} of held-out words hidden"
    lines = [
        f"{hidden} from encoders of width {grid.width}, after {grid.steps} steps",
        "",
        *_by_slots(grid, results),
        "",
        *_by_length(grid, results),
        "",
        f"share of hidden symbols predicted in a repeated half; chance {1 / SYMBOLS:.3f}",
        *_copies(grid, results),
    ]
    return "\n".join(lines)


def _by_slots(grid: SlotsGrid, results: Results) -> list[str]:
    """Return words with full attention, by number of slots, and by sharing."""
    shortest = grid.lengths[0]
    full = results[EncoderSetting("words", shortest, None)]
    columns = [
        Column(f"{shortest:,} tokens", 16, align="<", value=lambda result: _name(result.setting.slots)),
        Column("sharing", 12, align="<", value=lambda result: "" if result is full else result.setting.sharing),
        Column("perplexity", 10, ".2f", value="perplexity"),
        Column("nats/token", 12, ".4f", value="nats_per_token"),
        *with_error(ABOVE_FULL._replace(value=lambda result: (None, None) if result is full else result.above(full))),
    ]
    by_slots = [results[EncoderSetting("words", shortest, slots)] for slots in grid.slots]
    by_sharing = [results[EncoderSetting("words", shortest, grid.fixed, sharing)] for sharing in SHARINGS]
    return [*format_table(columns, [full, *by_slots]), "", *format_rows(columns, by_sharing)]


def _by_length(grid: SlotsGrid, results: Results) -> list[str]:
    above = ABOVE_FULL._replace(width=16, value=lambda pair: pair[1].above(pair[0]))
    columns = [
        Column("tokens", 7, ",", value=lambda pair: pair[0].setting.length),
        Column("full", 12, ".2f", value=lambda pair: pair[0].perplexity),
        Column(_name(grid.fixed), 12, ".2f", value=lambda pair: pair[1].perplexity),
        Column("   perplexity", 13, value=lambda pair: None),
        *with_error(above),
    ]
    rows = [
        [results[EncoderSetting("words", length, slots)] for slots in (None, grid.fixed)] for length in grid.lengths
    ]
    return format_table(columns, rows)


def _copies(grid: SlotsGrid, results: Results) -> list[str]:
    numbers = (None, *grid.slots)
    columns = [
        Column("tokens", 7, ","),
        Column("back", 8, ","),
        *(Column(_name(slots), 13, ".3f") for slots in numbers),
    ]
    accuracies = {
        (each.length, each.slots): (result.accuracy,) for each, result in results.items() if each.task == "copies"
    }
    rows = [[length, length // 2, *cells] for length, *cells in pivot_rows(grid.copies, numbers, accuracies)]
    return format_table(columns, rows)


def _name(slots: int | None) -> str:
    return "full" if slots is None else f"k = {slots}"


def figure(grid: SlotsGrid, results: Results) -> Figure:
    """Return nats against slots and against length, and copies against length."""

    def words(lengths: Sequence[int], slots: Sequence[int | None]) -> list[EncoderResult]:
        return [results[EncoderSetting("words", length, each)] for length in lengths for each in slots]

    shortest = grid.lengths[0]
    (full,) = words([shortest], [None])
    by_slots = Panel(
        [Line("Linformer", grid.slots, [each.nats_per_token for each in words([shortest], grid.slots)], style(1))],
        title=f"hidden words, {shortest:,} tokens",
        x_label="slots k",
        y_label="nats a token",
        ticks=grid.slots,
        levels=[Level(full.nats_per_token, Style(style(0).color), label="full")],
        legend=True,
    )
    by_length = Panel(
        lines_of(
            {slots: words(grid.lengths, [slots]) for slots in (None, grid.fixed)},
            "setting.length",
            "nats_per_token",
            label=_name,
        ),
        title="hidden words",
        x_label="tokens",
        y_label="nats a token",
        ticks=grid.lengths,
        legend=True,
    )
    of_copies = {
        slots: [result for each, result in results.items() if (each.task, each.slots) == ("copies", slots)]
        for slots in (None, *grid.slots)
    }
    copies = Panel(
        lines_of(of_copies, "setting.length", "accuracy", label=_name),
        title="copies from half a text back",
        x_label="tokens",
        y_label="share predicted",
        ticks=grid.copies,
        levels=[Level(1 / SYMBOLS, Style("0.6", ":"), label="chance")],
        y_range=(0, 1.03),
        legend=True,
    )
    return Figure([[by_slots, by_length, copies]], size=(12.0, 4.2))
