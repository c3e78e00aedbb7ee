#!/usr/bin/env python
"""How much faster than fused full attention is Linformer (Wang et al. 2020), and how much less memory does it take?

    tools/experiments/linformer_speed.py --lengths 512 4096 --slots 128

Times a layer of an encoder, and its attention alone, at each length with each number of slots k, in turns: a pass
without gradients, and a training step, which is a pass and its gradients. Memory is the peak of a layer beyond its
weights and inputs. The default is the shape of the paper's base model.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch

import lmlong
from lmlong.bench.timer import peak_bytes, quartiles, time_rounds

FULL, PARTS = "full", ("attention, pass", "attention, step", "layer, pass", "layer, step")
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


def forward(module: Any, *inputs: Any) -> None:
    with torch.no_grad():
        module(*inputs)


def step(module: Any, *inputs: Any) -> None:
    module(*inputs).sum().backward()
    for tensor in (*module.parameters(), *filter(torch.is_tensor, inputs)):
        tensor.grad = None


def passes(
    layers: Mapping[str, Any], length: int, options: argparse.Namespace
) -> dict[str, dict[str, Callable[[], None]]]:
    """Return the computations of each part, by attention."""
    qkv = torch.randn(3, 1, length, options.heads, options.width // options.heads, device=options.device)
    inputs = [x.transpose(1, 2).detach().requires_grad_() for x in qkv]
    x = torch.randn(1, length, options.width, device=options.device, requires_grad=True)
    calls = [[partial(call, layer.mixer.attention, *inputs) for layer in layers.values()] for call in (forward, step)]
    calls += [[partial(call, layer, x, None) for layer in layers.values()] for call in (forward, step)]
    return {part: dict(zip(layers, each, strict=True)) for part, each in zip(PARTS, calls, strict=True)}


def table(title: str, rows: Mapping[int, Mapping[str, float]], names: Sequence[str]) -> None:
    print(f"\n{title}\nn    k ={''.join(f'{name:>9}' for name in names)}")
    for length, of in rows.items():
        print(f"{length:8,}" + "".join(f"{of[name]:9.3g}" if name in of else f"{'-':>9}" for name in names))


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lengths = [2**power for power in range(9, 17)]
    parser.add_argument("--lengths", nargs="+", type=int, default=lengths, metavar="TOKENS", help="of the inputs")
    parser.add_argument("--slots", nargs="+", type=int, default=[128, 256], metavar="K")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--limit", type=float, default=20.0, metavar="SECONDS", help="longest step of full attention")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each part and length, but at least 3 rounds")
    parser.add_argument("--out", type=Path, default=Path("linformer-speed.png"), help="the picture")
    options = parser.parse_args()
    options.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = [FULL, *map(str, sorted(options.slots))]
    by_square = 0.0  # seconds of full attention, divided by the square of the length
    times: dict[int, dict[str, Seconds]] = {}
    memory: dict[str, dict[int, dict[str, float]]] = {part: {} for part in PARTS[2:]}
    for length in sorted(options.lengths):
        fits = [
            name for name in names if (by_square * length**2 <= options.limit if name == FULL else int(name) <= length)
        ]
        calls = passes({name: build(name, length, options) for name in fits}, length, options)
        for part, of in memory.items():  # which is the first pass too, that allocates
            of[length] = {name: peak_bytes(call, options.device) / 2**20 for name, call in calls[part].items()}
        times[length] = {part: time_rounds(each, options.device, options.seconds) for part, each in calls.items()}
        if FULL in fits:
            by_square = statistics.median(times[length][PARTS[-1]][FULL]) / length**2
    _, panels = plt.subplots(1, len(PARTS), sharey=True, figsize=(18, 4.5))
    for part, panel in zip(PARTS, panels, strict=True):
        show(part, {length: each[part] for length, each in times.items()}, names, panel)
    for part, rows in memory.items():
        table(f"{part}: peak MiB", rows, names)
    plt.savefig(options.out, bbox_inches="tight")


if __name__ == "__main__":
    main()
