"""A program that takes steps of a table as one rank of several, each with gradients of its own, and saves the table.

python rows_in_ranks.py RANK RANKS FOLDER
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, distributed

from lmlong import recipe
from lmlong.model.ngram_embedding import NgramEmbedding
from lmlong.training.row_adagrad import RowAdagrad

STEPS, BATCHES, TOKENS = 5, 2, 30


def optimizer_of(reads_values: bool, ranks: int) -> RowAdagrad:
    tables = NgramEmbedding(recipe.NgramEmbedding(orders=[2], rows=50, width=4), 6)
    return RowAdagrad(tables, reads_values, ranks)


def gradient_of(step: int, rank: int, batch: int) -> tuple[Tensor, Tensor]:
    """The rows of a batch, fewer in a later rank, and their gradients."""
    draw = torch.Generator().manual_seed(100 * step + 10 * rank + batch)
    tokens = TOKENS - 7 * rank
    return torch.randint(50, (tokens,), generator=draw), torch.randn(tokens, 4, generator=draw)


def take_steps(optimizer: RowAdagrad, ranks: list[int]) -> list[Tensor]:
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
    torch.save({x: take_steps(optimizer_of(x, ranks), [rank]) for x in (True, False)}, folder / f"{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
