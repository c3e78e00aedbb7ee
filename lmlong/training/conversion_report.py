"""Report of a conversion: the loss and the errors of layers after each stage."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lmlong.attention.parallel_window.layer import ParallelWindow, weighed
from lmlong.checkpoint import read
from lmlong.data.data_module import CausalDataModule
from lmlong.data.token_dataset import TokenDataset, prepare
from lmlong.model.block import Mixer
from lmlong.model.build import build
from lmlong.model.language_model import LanguageModel
from lmlong.model.metrics import LossTotals, batch_tensors, loss_totals
from lmlong.recipe import ATTENTION_KINDS, Recipe
from lmlong.report.progress import Progress
from lmlong.report.table import Column, format_table
from lmlong.training.conversion import StageRun
from lmlong.training.distillation import layer_errors
from lmlong.training.prepare import load_start

BYPASSED = 1.02
"""A model whose loss grows by less than this factor without its recurrences does not use them."""


class Point(NamedTuple):
    """A model at one point of a conversion."""

    name: str
    totals: LossTotals
    layers: list[float] | None = None
    """The error of each layer relative to the teacher's output for the same input."""
    without_recurrence: LossTotals | None = None
    """The loss with recurrences switched off, if the model has both recurrences and exact attention."""
    recurrent_shares: list[float] | None = None
    """The recurrence's share of each layer's output before its projection, for layers with a parallel window."""

    @property
    def bypassed(self) -> bool:
        """Whether the model does not use its recurrent layers."""
        return (
            self.without_recurrence is not None
            and self.without_recurrence.bits_per_byte < BYPASSED * self.totals.bits_per_byte
        )


def measure(teacher: str, planned: list[StageRun]) -> list[Point]:
    """Return the loss on held-out text of the teacher, of the untrained model with new attention, and of each stage.

    Sequences have the length of the first stages and begin from an empty state.
    """
    first = planned[0].recipe
    tokens = prepare(first.text, read.reading(teacher, read.read_tokenizer))
    old = _model(read.reading(teacher, read.read_recipe), teacher, tokens)
    text = CausalDataModule(first, tokens).validation(first.training.validation_tokens)
    batches = [batch_tensors(batch) for batch in text]
    torch.manual_seed(first.seed)
    models = chain(
        [("swapped", _model(first, teacher, tokens, new_attention=True))],
        ((stage.name, _model(stage.recipe, stage.folder, tokens)) for stage in planned),  # one at a time
    )
    points = [Point("teacher", _loss(old, batches, tokens))]
    with Progress("measuring", 1 + len(planned), "models") as progress:
        for name, model in models:
            points.append(_point(name, model, first.model.kinds, old, batches, tokens))
            progress.update()
    return points


def table(points: list[Point], length: int) -> str:
    """Return the points as a table, with the mean and largest error of layers."""
    columns = [
        Column("", 14, align="<"),
        Column("bits/byte", 10, ".4f"),
        Column("recurrence off", 16, ".4f"),
        Column("error of layers: mean", 23, ".4f"),
        Column("largest", 10, ".4f"),
    ]
    rows = []
    for point in points:
        off = point.without_recurrence and point.without_recurrence.bits_per_byte
        errors = [sum(point.layers) / len(point.layers), max(point.layers)] if point.layers else []
        rows.append([point.name, point.totals.bits_per_byte, off, *errors])
    lines = [f"{points[0].totals.tokens:,} held-out tokens in sequences of {length:,}", *format_table(columns, rows)]
    if shares := points[-1].recurrent_shares:
        mean = sum(shares) / len(shares)
        lines.append(
            f"recurrences contribute {mean:.0%} of the output of layers with a window; the least is {min(shares):.0%}"
        )
    if points[-1].bypassed:
        lines.append("The recurrences are bypassed: the loss is about the same without them.")
    return "\n".join(lines)


Batch = tuple[Tensor, Tensor, Tensor]


def _model(recipe: Recipe, run: str | Path, tokens: TokenDataset, new_attention: bool = False) -> LanguageModel:
    model = build(recipe, tokens.tokenizer.vocabulary)
    assert isinstance(model, LanguageModel)
    read.reading(run, lambda checkpoint: load_start(model, checkpoint, new_attention))
    return model.eval().requires_grad_(False)


def _loss(model: LanguageModel, batches: list[Batch], tokens: TokenDataset) -> LossTotals:
    return loss_totals(model, batches, torch.from_numpy(tokens.tokenizer.token_bytes))


@torch.no_grad()
def _point(
    name: str,
    model: LanguageModel,
    kinds: list[str],
    teacher: LanguageModel,
    batches: list[Batch],
    tokens: TokenDataset,
) -> Point:
    errors = torch.stack([layer_errors(model, teacher, inputs, starts) for inputs, _, starts in batches]).mean(0)
    by_kind = zip(model.blocks, kinds, strict=True)
    recurrent = [block.mixer for block, kind in by_kind if not ATTENTION_KINDS[kind].exact]
    both = [mixer.attention for mixer in recurrent if isinstance(mixer.attention, ParallelWindow)]
    without = None
    if recurrent and (both or len(recurrent) < len(model.blocks)):
        with ExitStack() as hooks:
            for mixer in recurrent:
                hooks.callback(_leave_out_recurrence(mixer).remove)
            without = _loss(model, batches, tokens)
    with _recurrent_shares(both) as shares:
        totals = _loss(model, batches, tokens)
    return Point(name, totals, errors.tolist(), without, shares() if both else None)


def _leave_out_recurrence(mixer: Mixer) -> RemovableHandle:
    """Switch off a mixer, or only its recurrence if it has a parallel window."""
    if isinstance(mixer.attention, ParallelWindow):
        return mixer.get_submodule("window_share").register_forward_hook(
            lambda module, inputs, share: torch.ones_like(share)
        )
    return mixer.register_forward_hook(lambda module, inputs, result: (torch.zeros_like(result[0]), result[1]))


@contextmanager
def _recurrent_shares(attentions: Sequence[ParallelWindow]) -> Iterator[Callable[[], list[float]]]:
    """Measure the recurrence's share of each layer's output, by vector norms; the function returns the shares at the
    end."""
    lengths = torch.zeros(len(attentions), 2, dtype=torch.float64)  # of the recurrence, and in total
    outputs: dict[nn.Module, Tensor] = {}  # by the parts of a layer

    def keep(part: nn.Module, arguments: tuple[Any, ...], result: tuple[Tensor, Any]) -> None:
        outputs[part] = result[0]

    def counter(layer: int) -> Callable[..., None]:
        def count(attention: ParallelWindow, arguments: tuple[Any, ...], result: tuple[Tensor, Any]) -> None:
            from_window, from_recurrence = weighed(
                outputs.pop(attention.window), outputs.pop(attention.recurrence), arguments[-1]
            )
            recurrent, exact = (part.norm(dim=-1).double().sum().cpu() for part in (from_recurrence, from_window))
            lengths[layer] += torch.stack([recurrent, recurrent + exact])

        return count

    with ExitStack() as hooks:
        for layer, attention in enumerate(attentions):
            for part in attention.parts:
                hooks.callback(part.register_forward_hook(keep).remove)
            hooks.callback(attention.register_forward_hook(counter(layer)).remove)
        yield lambda: (lengths[:, 0] / lengths[:, 1]).tolist()
