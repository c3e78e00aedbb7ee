#!/usr/bin/env python
"""Read books one after the other along one state, without document starts, and again each part with little before it.

    python tools/along_one_state.py RUN... --data 'books/*.txt' [--tokens 1m] [--context 4k]

A state that was never further than a training sequence from an empty one meets here sums of a million tokens, most of
them of other books. Prints the loss both ways and the paired difference, along the state minus with that much context,
in nats per token; its error is over sixteen parts of the text. A difference above 0 says that a long state does harm.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lmlong.inference.loading import load
from lmlong.model.language_model import LanguageModel
from lmlong.recipe.lengths import parse_length

PARTS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--data", required=True, help="a glob of text files, read in the order of their names")
    parser.add_argument("--tokens", type=parse_length, default=1 << 20)
    parser.add_argument("--context", type=parse_length, default=4096)
    options = parser.parse_args()
    files = sorted(Path(options.data).parent.glob(Path(options.data).name))
    book = "\n\n".join(file.read_text(encoding="utf-8") for file in files)
    print(f"{'run':<24} {'tokens':>10} {'one state':>10} {'context':>10} {'difference':>11} {'±':>8}")
    for run in options.runs:
        loaded = load(run)
        assert isinstance(loaded.model, LanguageModel)
        ids = [loaded.tokenizer.bos, *loaded.tokenizer.encode(book[: 16 * options.tokens])][: options.tokens + 1]
        tokens = torch.tensor([ids])
        long = along(loaded.model, tokens)[options.context :]
        short = with_context(loaded.model, tokens, options.context)
        differences = (long - short).split(-(-len(long) // PARTS))
        means = np.array([float(part.mean()) for part in differences])
        error = means.std(ddof=1) / len(means) ** 0.5
        print(
            f"{run[-24:]:<24} {len(long):>10,} {long.mean():>10.4f} {short.mean():>10.4f} "
            f"{(long - short).mean():>+11.4f} {error:>8.4f}",
            flush=True,
        )


def along(model: LanguageModel, tokens: Tensor) -> Tensor:
    """Return -log p of each token but the first, read along one state."""
    return model.token_nll(tokens[:, :-1], tokens[:, 1:])[0][0]


def with_context(model: LanguageModel, tokens: Tensor, context: int) -> Tensor:
    """Return -log p of each token from place `context` + 1 on, each with so many tokens before it, or up to twice as
    many, from an empty state."""
    found = []
    for begin in range(0, tokens.shape[1] - 1 - context, context):
        found.append(along(model, tokens[:, begin : begin + 2 * context + 1])[context:])
    return torch.cat(found)


if __name__ == "__main__":
    main()
