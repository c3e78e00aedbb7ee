#!/usr/bin/env python
"""Memory and time of one training step on sequences of growing length: plain, in segments, and truncated.

    tools/long_sequence.py --lengths 16k,64k,256k,1m --plain-up-to 64k

Each figure comes from a process of its own: a model of 4 layers and width 128, forward and backward pass in bfloat16
on one thread. Memory is the peak over what the process held before the step. Prints a Markdown table.
"""

import argparse
import os
import resource
import subprocess
import sys
import time

import torch

from lmlong import recipe
from lmlong.attention.base import state_tensors
from lmlong.model.language_model import LanguageModel
from lmlong.model.segments import Segment
from lmlong.model.state import detach_state
from lmlong.recipe.lengths import name_length, parse_lengths

VOCABULARY = 1024


def resident() -> int:
    """Bytes this process holds now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def build() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(
        recipe.Model(width=128, layers=4, heads=4, attention=recipe.Attention(kind="linear")), VOCABULARY
    )


def step(model: LanguageModel, mode: str, tokens: torch.Tensor, segment: int) -> None:
    """Forward and backward over the whole sequence."""
    targets = tokens.roll(-1, 1)
    if mode != "truncated":
        nll, _ = model.loss(tokens, targets, segment=segment if mode == "segments" else None)
        (nll / tokens.numel()).backward()
        return
    state = model.init_state(1)
    for part in Segment(tokens, targets).split(segment):
        nll, after = model.loss(part.tokens, part.targets, state=state)
        (nll / tokens.numel()).backward()
        state = detach_state(after)


def measure(mode: str, length: int, segment: int) -> None:
    """Print the bytes and seconds of one step; a short one before it is not counted."""
    torch.set_num_threads(1)
    model = build()
    tokens = torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        step(model, mode, tokens[:, :64], 32)
        before, begun = resident(), time.perf_counter()
        step(model, mode, tokens, segment)
    seconds = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    states = sum(x.numel() * x.element_size() for x in state_tensors(model.init_state(1))) * (length // segment - 1)
    print(peak - before, seconds, states)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=parse_lengths, default=parse_lengths("16k,64k,256k,1m"))
    parser.add_argument("--plain-up-to", type=lambda text: parse_lengths(text)[0], default=65_536)
    parser.add_argument("--segment", type=int, default=2048)
    parser.add_argument("--child", nargs=2, metavar=("MODE", "LENGTH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measure(options.child[0], int(options.child[1]), options.segment)
        return
    print("| tokens | mode | activations MB | of them states MB | seconds | tokens/s |\n|---|---|---|---|---|---|")
    for length in options.lengths:
        for mode in ("plain", "segments", "truncated"):
            if mode == "plain" and length > options.plain_up_to:
                continue
            child = subprocess.run(
                [sys.executable, __file__, "--segment", str(options.segment), "--child", mode, str(length)],
                capture_output=True,
                text=True,
                check=True,
                # memory that was freed goes back at once, so that the peak is what was in use
                env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144"},
            )
            peak, seconds, states = map(float, child.stdout.split())
            kept = f"{states / 1e6:.1f}" if mode == "segments" else "-"
            cells = [name_length(length), mode, f"{peak / 1e6:.0f}", kept, f"{seconds:.1f}", f"{length / seconds:,.0f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
