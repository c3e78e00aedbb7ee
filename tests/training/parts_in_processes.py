"""A program that reads parts of rows as one process of several, averages gradients as a training step does, and saves
what it has computed.

    python parts_in_processes.py RANK PROCESSES PARTS FOLDER KIND ...

P parts of a row, which a group of P processes reads. A run of several groups divides the rows among them.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from model.parts import TOKENS, build, text
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from lmlong.model.language_model import LanguageModel
from lmlong.model.loss import IGNORED
from lmlong.model.sequence_group import SequenceGroup, part_of
from lmlong.model.state import detach_state
from lmlong.training.sequence_processes import loss_of_part

ROWS = 2
"""Rows that a group reads together."""

DTYPES = (torch.float64, torch.float32)

Batch = tuple[Tensor, Tensor, Tensor]


class Computed(NamedTuple):
    loss: Tensor  # summed over the targets that this process reads
    norm: Tensor  # of the whole gradient
    gradients: dict[str, Tensor]


def batches(parts: int, rows: int) -> Iterator[tuple[str, Batch, bool]]:
    """Batches with their names, and whether the state after the one before enters."""
    own = [part_of(TOKENS, rank, parts) for rank in range(parts)]
    near_borders = [part.start + offset for part in own[1:] for offset in (-1, 0, 1)]
    yield "documents at borders", text([0, 7, *near_borders, TOKENS - 2], rows), False
    yield "a state enters", text([own[1].start + 5], rows), True
    yield "no document starts", text([], rows), False
    for name, part in (("the first", own[0]), ("the last", own[-1])):
        tokens, targets, starts = text([20], rows)
        targets[:, part] = IGNORED
        yield f"{name} has no targets", (tokens, targets, starts), False


def model_of(kind: str, dtype: torch.dtype) -> LanguageModel:
    torch.manual_seed(0)  # of random features
    model = build(kind).to(dtype)
    model.set_state_dtype(dtype)
    return model


class Step(nn.Module):
    """The loss of a training step, and the state after it."""

    def __init__(self, model: LanguageModel, group: SequenceGroup):
        super().__init__()
        self.model, self.group = model, group

    def forward(self, batch: Batch, state: Any) -> tuple[Tensor, Any]:
        loss, after = loss_of_part(self.model, *batch, state, self.group)
        return loss, detach_state(after)


def compute(kind: str, dtype: torch.dtype, group: SequenceGroup, groups: range) -> dict[str, Computed]:
    """Compute each batch as a process of one of some groups, each of which reads a share of the rows."""
    model, computed, state = model_of(kind, dtype), {}, None
    step = DistributedDataParallel(Step(model, group))
    for name, batch, enters in batches(group.size, ROWS * len(groups)):
        tokens, targets, starts = (each.chunk(len(groups))[group.first // group.size] for each in batch)
        loss, after = step((tokens, targets, starts), state if enters else None)
        state = group.state_after(after) if model.constant_state else None
        (loss * group.size / targets.numel()).backward()  # as `TrainingModule.training_step` divides it
        gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
        norm = nn.utils.get_total_norm(gradients.values())
        computed[name] = Computed(loss.detach(), norm, gradients)
        model.zero_grad()
    return computed


def main(rank: int, processes: int, parts: int, folder: Path, kinds: list[str]) -> None:
    store = f"file://{folder / 'store'}"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=processes)
    group, groups = SequenceGroup(rank, processes, parts), range(processes // parts)
    computed = {(kind, dtype): compute(kind, dtype, group, groups) for kind in kinds for dtype in DTYPES}
    plain = {key: {name: tuple(each) for name, each in of_kind.items()} for key, of_kind in computed.items()}
    torch.save(plain, folder / f"{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*map(int, sys.argv[1:4]), Path(sys.argv[4]), sys.argv[5:])  # type: ignore[call-arg, arg-type]
