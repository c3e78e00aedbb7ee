"""A program that takes steps as one rank of several: of Muon, compared with those that it takes alone, and of a table.

    python optimizers_in_ranks.py RANK RANKS FOLDER

It prints the operations of Muon's steps and of those taken alone, and saves the table.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils.flop_counter import FlopCounterMode

from lmlong import recipe
from lmlong.model.ngram_embedding import NgramEmbedding
from lmlong.training.muon import Muon
from lmlong.training.orthogonal import DividedMatrix
from lmlong.training.row_adagrad import RowAdagrad

STACKS: dict[tuple[int, int], list[int]] = {
    (96, 24): [24, 24, 40, 8],
    (24, 24): [24],
    (130, 24): [65, 65],
    (24, 65): [24],
}
"""The heights of the matrices in weights of these shapes, of which a model has two each."""


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(drawn(*shape, seed=number)) for number, shape in enumerate([*STACKS, *STACKS])]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def take_steps(optimizer: Muon, ones: list[Any], gradients: list[list[Tensor]]) -> int:
    """Take a step for each list of gradients; the operations of their matrix products."""
    with FlopCounterMode(display=False) as counter:
        for of_step in gradients:
            for weight, gradient in zip(ones, of_step, strict=True):
                weight.grad = gradient
            optimizer.step()
    return counter.get_total_flops()


class Divided:
    """Weights as ZeRO divides them: all of them in turn (stages 1 and 2), or each by itself (stage 3)."""

    root_device = torch.device("cpu")

    def __init__(self, shapes: list[torch.Size], ranks: int, each: bool):
        self.shapes, self.ranks, self.each = shapes, ranks, each
        sizes = [shape.numel() for shape in shapes]
        self.spans = [-(-size // ranks) for size in (sizes if each else [sum(sizes)])]

    def part(self, tensors: list[Tensor], rank: int) -> Tensor:
        flats = [tensor.detach().flatten() for tensor in tensors]
        rows = []
        for flat, span in zip(flats if self.each else [torch.cat(flats)], self.spans, strict=True):
            rows.append(torch.cat([flat, flat.new_zeros(span * self.ranks - len(flat))]).view(self.ranks, span)[rank])
        return torch.cat(rows)

    def matrices(self, part: Tensor) -> list[DividedMatrix]:
        result, begin, offset = [], 0, 0
        for number, (height, width) in enumerate(self.shapes):
            for rows in STACKS[height, width]:
                result.append(DividedMatrix((rows, width), begin, self.spans[number if self.each else 0], offset))
                begin += rows * width
            if self.each:
                begin, offset = 0, offset + self.spans[number]
        return result


STEPS, BATCHES, TOKENS = 5, 2, 30


def optimizer_of(reads_values: bool, ranks: int) -> RowAdagrad:
    tables = NgramEmbedding(recipe.NgramEmbedding(orders=[2], rows=50, width=4), 6)
    return RowAdagrad(tables, reads_values, ranks)


def gradient_of(step: int, rank: int, batch: int) -> tuple[Tensor, Tensor]:
    """The rows of a batch, fewer in a later rank, and their gradients."""
    draw = torch.Generator().manual_seed(100 * step + 10 * rank + batch)
    tokens = TOKENS - 7 * rank
    return torch.randint(50, (tokens,), generator=draw), torch.randn(tokens, 4, generator=draw)


def take_row_steps(optimizer: RowAdagrad, ranks: list[int]) -> list[Tensor]:
    """Take all steps with the gradients of some ranks; return the table and the sums of squares."""
    for step in range(STEPS):
        for rank in ranks:
            for batch in range(BATCHES):
                optimizer.gradients.add(*gradient_of(step, rank, batch))
                optimizer.expect(TOKENS)
        optimizer.step(1.0, torch.tensor(step == 2))
    assert optimizer.squares is not None
    return [optimizer.tables.table, optimizer.squares]


def main(rank: int, ranks: int, folder: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks)
    rows = {reads: take_row_steps(optimizer_of(reads, ranks), [rank]) for reads in (True, False)}
    torch.save(rows, folder / f"{rank}.pt")
    operations = {}
    for dtype in (torch.float32, torch.bfloat16):
        group: dict[str, Any] = {
            "stacks": [STACKS[w.shape[0], w.shape[1]] for w in weights()],
            "weight_decay": 0.1,
            "lr": 1e-2,
        }
        alone, replicas = weights(), weights()
        gradients = [[drawn(*weight.shape, seed=9 * step + n) for n, weight in enumerate(alone)] for step in range(3)]
        by_one = Muon([group | {"params": alone}], (0.9, 0.99), dtype)
        by_ranks = Muon([group | {"params": replicas}], (0.9, 0.99), dtype, ranks=ranks)
        operations["alone"] = take_steps(by_one, alone, gradients)
        by_ranks.step()  # without gradients, as after one that was not finite
        operations["replicas"] = take_steps(by_ranks, replicas, gradients)
        moments = [by_one.state[weight]["momentum"] for weight in alone]
        for weight, replica, moment in zip(alone, replicas, moments, strict=True):
            assert torch.equal(weight, replica) and torch.equal(moment, by_ranks.state[replica]["momentum"])
        for each in (False, True):
            divided = Divided([weight.shape for weight in alone], ranks, each)
            part = nn.Parameter(divided.part(weights(), rank))
            optimizer = Muon([group | {"params": [part]}], (0.9, 0.99), dtype)
            optimizer.partition = divided
            operations[f"divided {each}"] = take_steps(optimizer, [part], [[divided.part(g, rank)] for g in gradients])
            assert torch.equal(part, divided.part(alone, rank))
            assert torch.equal(optimizer.state[part]["momentum"], divided.part(moments, rank))
    print(json.dumps(operations))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
