#!/usr/bin/env python
"""How much faster than full attention is Linformer (Wang et al. 2020), and how much less memory does it take?

    tools/experiments/linformer_speed.py --lengths 512 4096 --slots 128

Times a pass without gradients of the attention alone and of a whole layer of an encoder, at each length with each
number of slots k, in turns. The default is the shape of the paper's base model.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor

import lmlong
from lmlong.bench.timer import peak_bytes, quartiles, time_rounds

FULL, PARTS = "full", ("attention alone", "whole layer")
Seconds = dict[str, list[float]]
"""Of each pass, by attention and round."""


def build(name: str, length: int, options: argparse.Namespace) -> Any:
    """Return a layer of an encoder with full attention, or with a Linformer of this many slots."""
    attention: dict[str, Any] = {"kind": FULL, "decay": "none"}
    if name != FULL:
        attention |= {"kind": "linformer", "linformer": {"projected": int(name)}}
    model = {"width": options.width, "heads": options.heads, "layers": 1, "convolution": 0, "attention": attention}
    encoder = lmlong.Encoder(lmlong.recipe.Model.model_validate(model), vocabulary=2, longest=length)
    return encoder.blocks[0].to(options.device)


def draw(length: int, options: argparse.Namespace, device: torch.device) -> list[Tensor]:
    """Return queries, keys and values in the layout of a layer."""
    drawn = torch.randn(3, 1, length, options.heads, options.width // options.heads, device=device)
    return [x.transpose(1, 2) for x in drawn]


def memory(layers: Mapping[str, Any], length: int, options: argparse.Namespace) -> dict[str, float]:
    """Return how many rows fit into the memory of one row of full attention that holds all its weights."""
    shapes, values = draw(length, options, torch.device("meta")), draw(length, options, options.device)
    inputs = sum(x.nbytes for x in values)
    weights = partial(build(FULL, length, options).mixer.attention.definition, *shapes)  # need not fit into memory
    matrix = inputs + peak_bytes(weights, torch.device("meta"))
    passes = {name: partial(layer.mixer.attention, *values) for name, layer in layers.items()}
    return {name: matrix / (inputs + peak_bytes(call, options.device)) for name, call in passes.items()}


def measure(layers: Mapping[str, Any], length: int, options: argparse.Namespace) -> dict[str, Seconds]:
    """Return the seconds of the passes of the attention alone and of the whole layer."""
    qkv, x = draw(length, options, options.device), torch.randn(1, length, options.width, device=options.device)
    alone = {name: partial(layer.mixer.attention, *qkv) for name, layer in layers.items()}
    whole = {name: partial(layer, x, None) for name, layer in layers.items()}
    for call in (*alone.values(), *whole.values()):
        call()  # the first pass allocates
    return {part: time_rounds(passes, options.device) for part, passes in zip(PARTS, (alone, whole), strict=True)}


def show(part: str, results: Mapping[int, Seconds], names: Sequence[str], panel: Any) -> None:
    """Print and draw the times of one part."""
    print(f"\n{part}\n{'':8}{'times as fast as full':{9 * len(names) - 9}} microseconds a token")
    print(f"n    k ={''.join(f'{name:>9}' for name in (*names[1:], *names))}")
    for length, seconds in results.items():
        pairs = {
            name: zip(seconds[FULL], seconds[name], strict=True) for name in names[1:] if {FULL, name} <= {*seconds}
        }
        ratios = {name: statistics.median(full / short for full, short in pair) for name, pair in pairs.items()}
        times = {name: quartiles(each)[1] / length * 1e6 for name, each in seconds.items()}
        cells = [ratios.get(name) for name in names[1:]] + [times.get(name) for name in names]
        print(f"{length:8,}" + "".join(f"{cell:9.3g}" if cell else f"{'-':>9}" for cell in cells))
    for name in names:
        points = {length: quartiles(seconds[name]) for length, seconds in results.items() if name in seconds}
        low, middle, high = zip(*([value / n * 1e6 for value in each] for n, each in points.items()), strict=True)
        panel.semilogx([*points], middle, "o-", base=2, label=name if name == FULL else f"k = {name}")
        panel.fill_between([*points], low, high, alpha=0.2)
    panel.set(title=part, xlabel="tokens", yscale="log", ylabel="microseconds a token, with quartiles")
    panel.legend()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lengths = [2**power for power in range(9, 17)]
    parser.add_argument("--lengths", nargs="+", type=int, default=lengths, metavar="TOKENS", help="of the inputs")
    parser.add_argument("--slots", nargs="+", type=int, default=[128, 256, 512, 1024], metavar="K")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--limit", type=float, default=20.0, metavar="SECONDS", help="longest pass of full attention")
    parser.add_argument("--out", type=Path, default=Path("linformer-speed.png"), help="the picture")
    options = parser.parse_args()
    options.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = [FULL, *map(str, sorted(options.slots))]
    by_square = 0.0  # seconds of full attention, divided by the square of the length
    times: dict[int, dict[str, Seconds]] = {}
    rows: dict[int, dict[str, float]] = {}
    for length in sorted(options.lengths):
        fits = [
            name for name in names if (by_square * length**2 <= options.limit if name == FULL else int(name) <= length)
        ]
        layers = {name: build(name, length, options) for name in fits}
        rows[length], times[length] = memory(layers, length, options), measure(layers, length, options)
        if FULL in layers:
            by_square = statistics.median(times[length][PARTS[1]][FULL]) / length**2
    _, panels = plt.subplots(1, 2, sharey=True, figsize=(10, 4.5))
    for part, panel in zip(PARTS, panels, strict=True):
        show(part, {length: each[part] for length, each in times.items()}, names, panel)
    print("\nrows of the attention in the memory of one row that holds all n x n weights")
    print(f"n    k ={''.join(f'{name:>9}' for name in names)}")
    for length, of in rows.items():
        print(f"{length:8,}" + "".join(f"{of[name]:9.3g}" if name in of else f"{'-':>9}" for name in names))
    plt.savefig(options.out, bbox_inches="tight")


if __name__ == "__main__":
    main()
