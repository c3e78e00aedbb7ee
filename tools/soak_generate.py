"""A text without end in memory that does not grow: resident memory and speed, early and late.

    python tools/soak_generate.py --tokens 1000000

A small model writes so many tokens. The resident memory after the first 10,000 is held against that at the end. Then it
goes on for some blocks of 1,000 tokens from both places in turn, so that a machine that slows down does so for both.
"""

import argparse
import resource
import statistics
import sys
import time

import torch

from lmlong import recipe
from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.inference.generation import Generation
from lmlong.inference.sampling import Sampler, Sampling
from lmlong.inference.session import Session, prefill
from lmlong.model.fast_step import make_fast_step, why_no_fast_step
from lmlong.model.language_model import LanguageModel

BLOCK, EARLY, ROUNDS = 1_000, 10_000, 15


class Endless(ByteTokenizer):
    """Bytes without a token that ends a document."""

    def __init__(self) -> None:
        super().__init__()
        self.eos = -1


def resident() -> int:
    """Bytes of this process that are in memory now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def write(model: LanguageModel, session: Session, tokens: int) -> Session:
    """Go on for so many tokens."""
    writing = Generation(model, Endless(), session, Sampler(Sampling(repetition_penalty=1.1)), tokens)
    for _ in writing:
        pass
    return writing.session


def main() -> None:
    """Write, and print memory and speed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = Endless()
    model = LanguageModel(recipe.Model(width=options.width, layers=options.layers, heads=2), tokenizer.vocabulary)
    if why_no_fast_step(model.eval()) is None:
        model.fast_step = make_fast_step(model)
    early = late = write(model, prefill(model, [[tokenizer.bos]]), EARLY)
    before = resident()
    while int(late.total) < options.tokens:
        begun = time.perf_counter()
        late = write(model, late, min(50 * BLOCK, options.tokens - int(late.total)))
        speed = 50 * BLOCK / (time.perf_counter() - begun)
        print(f"{int(late.total):,} tokens, {resident() / 1e6:.2f} MB, {speed:,.0f} tokens/s", file=sys.stderr)
    after, total = resident(), int(late.total)
    taken: dict[str, list[float]] = {"early": [], "late": []}
    for _ in range(ROUNDS):
        for name, session in (("early", early), ("late", late)):
            begun = time.perf_counter()
            write(model, session, BLOCK)
            taken[name].append((time.perf_counter() - begun) / BLOCK)
    first, last = (statistics.median(times) for times in taken.values())
    print(
        f"memory   {before / 1e6:.2f} MB after {EARLY:,} tokens, {after / 1e6:.2f} MB after {total:,}: "
        f"{after / before - 1:+.2%}"
    )
    print(
        f"speed   {1 / first:,.0f} tokens/s after {EARLY:,} tokens, {1 / last:,.0f} after {total:,}: "
        f"{last / first - 1:+.1%} a token"
    )


if __name__ == "__main__":
    main()
