#!/usr/bin/env python
"""How much quality does Linformer (Wang et al. 2020) lose with k slots, on masked words and on copies?

    tools/experiments/linformer_slots.py
    tools/experiments/linformer_slots.py --slots 16 64 --lengths 256 512 --copies 64

Encoders with full attention and with Linformer are trained alike: to predict masked words, by number of slots, by what
shares projections and by length; and to predict masked symbols of texts whose second half repeats the first, which
takes 1 bit a symbol at best, since a quarter of the copies are masked too, and 4 bits without the copy. Each training
is a run folder in --out: a finished one is not trained again, an interrupted one is resumed.
"""

import argparse
import json
import random
import sys
from math import log
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

import lmlong

SHARINGS = ("none", "headwise", "key-value", "layerwise")
AT_ONCE = 4096
"""Tokens of a training step, for texts of any length."""
SYMBOLS = "abcdefghijklmnop"
COPYING = 2
"""Training steps on copies for each step on words."""


def train(
    name: str, slots: int | None, sharing: str, text: dict[str, Any], steps: int, options: argparse.Namespace
) -> float:
    """Return the nats for each masked token of the held-out text, from a training, or from its finished run."""
    name = f"{name}-full" if slots is None else f"{name}-{slots}-{sharing}"
    attention: dict[str, Any] = {"kind": "full"}
    if slots is not None:
        attention = {"kind": "linformer", "linformer": {"projected": slots, "sharing": sharing}}
    recipe = {
        "objective": "masked",
        "seed": options.seed,
        "text": text,
        "model": {"width": options.width, "layers": 2, "heads": max(options.width // 32, 1), "attention": attention},
        "training": {
            "steps": steps,
            "batch_size": AT_ONCE // text["sequence_length"],
            "optimizer": "adamw",
            "learning_rate": 4e-3,
            "warmup_steps": steps // 10,
            "validation_tokens": 16 * AT_ONCE,
        },
    }
    print(name, file=sys.stderr)
    metrics = lmlong.train(lmlong.Recipe.load(recipe), options.out / name, resume="auto").metrics
    losses = [entry.get("final_validation") or entry.get("validation") for entry in metrics]
    return [loss["nats_per_token"] for loss in losses if loss][-1]


def words(length: int, slots: int | None, sharing: str, options: argparse.Namespace) -> float:
    """Return the loss on masked words of Python's standard library."""
    text = {"tokenizer": {"vocabulary": 1024}, "sequence_length": length, "masking": {"kind": "plain"}}
    return train(f"words-{length}", slots, sharing, text, options.steps, options)


def copies(length: int, slots: int | None, options: argparse.Namespace) -> float:
    """Return the bits for each masked symbol of random texts whose second half repeats the first."""
    draw, sources = random.Random(options.seed), []
    for name, tokens in (("train", COPYING * options.steps * AT_ONCE), ("test", 16 * AT_ONCE)):
        halves = ("".join(draw.choices(SYMBOLS, k=length // 2)) for _ in range(tokens // length))
        path = options.out / f"copies-{length}-{name}.jsonl"
        path.write_text("".join(json.dumps({"text": 2 * half}) + "\n" for half in halves))
        sources.append([{"kind": "files", "paths": [str(path)]}])
    text = {
        "sources": sources[0],
        "validation": {"sources": sources[1]},
        "tokenizer": {"kind": "characters", "alphabet": SYMBOLS},
        "rows": "documents",
        "sequence_length": length + 2,  # with the marks of its start and end
        "masking": {"kind": "plain", "share": 0.25},
    }
    return train(f"copies-{length}", slots, "headwise", text, COPYING * options.steps, options) / log(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", nargs="+", type=int, default=[16, 64, 256], metavar="K")
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048, 4096], help="tokens of words")
    parser.add_argument("--copies", nargs="+", type=int, default=[64, 128, 256], help="tokens of copies")
    parser.add_argument("--steps", type=int, default=200, help="training steps of 4,096 tokens on words")
    parser.add_argument("--width", type=int, default=64, help="of the encoders")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/linformer-slots"), help="folder of runs and picture")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    shortest, middle = options.lengths[0], options.slots[len(options.slots) // 2]
    asked = [(shortest, slots, "headwise") for slots in options.slots]
    asked += [(shortest, middle, sharing) for sharing in SHARINGS]
    asked += [(length, middle, "headwise") for length in options.lengths]
    full = {length: words(length, None, "", options) for length in options.lengths}
    print(f"masked words, width {options.width}, {options.steps} steps\n")
    print(" tokens     k  sharing    nats/token  above full")
    for length, nats in full.items():
        print(f"{length:7,}  full {nats:21.4f}")
    short = {}
    for length, slots, sharing in dict.fromkeys(asked):
        nats = short[length, slots, sharing] = words(length, slots, sharing, options)
        print(f"{length:7,}{slots:6}  {sharing:9}{nats:12.4f}{nats - full[length]:+12.4f}", flush=True)
    _, (by_slots, by_length, copied) = plt.subplots(1, 3, figsize=(13, 4))
    by_slots.plot(
        options.slots, [short[shortest, slots, "headwise"] for slots in options.slots], "o-", label="Linformer"
    )
    by_slots.axhline(full[shortest], color="C1", label="full")
    by_slots.set(title=f"masked words, {shortest:,} tokens", xlabel="slots k", ylabel="nats a token")
    by_length.plot([*full], [short[length, middle, "headwise"] for length in full], "o-", label=f"k = {middle}")
    by_length.plot([*full], [*full.values()], "o-", label="full")
    by_length.set(title="masked words", xlabel="tokens")
    print(
        "\nbits for each masked symbol of copies, from 4 to 1\n\n tokens    full"
        + "".join(f"{f'k = {k}':>9}" for k in options.slots)
    )
    bits = {(n, k): copies(n, k, options) for n in options.copies for k in (None, *options.slots) if (k or 1) <= n}
    for length in options.copies:
        cells = (bits.get((length, slots)) for slots in (None, *options.slots))
        print(f"{length:7,}" + "".join(f"{cell:9.3f}" if cell else f"{'-':>9}" for cell in cells))
    for slots in (None, *options.slots):
        points = [(length, bits[length, slots]) for length in options.copies if (length, slots) in bits]
        copied.plot(*zip(*points, strict=True), "o-", label="full" if slots is None else f"k = {slots}")
    copied.set(title="copies from half a text back", xlabel="tokens", ylabel="bits a symbol")
    for panel in (by_slots, by_length, copied):
        panel.legend()
    plt.savefig(options.out / "linformer-slots.png", bbox_inches="tight")


if __name__ == "__main__":
    main()
