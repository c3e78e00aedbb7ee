#!/usr/bin/env python
"""Train one small model with each attention alike, and compare bits per byte, parameters, speed and state.

    tools/experiments/compare.py
    tools/experiments/compare.py --corpus copies --only softmax delta --seeds 1 --set training.tokens=2400000

The learning rate is chosen with seed 0, from the given ones and further ones until the best is not at an end. Each
training is a run folder in --out/CORPUS, beside compare.png: a finished one is skipped, an interrupted one resumed.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from string import ascii_lowercase
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch

import lmlong
from lmlong.recipe.kinds import candidates

TRAINING = {"tokens": 600_000, "batch_size": 4, "optimizer": "adamw", "warmup_steps": 40, "validation_tokens": 20_000}
RECIPE = {
    "text": {"tokenizer": {"vocabulary": 1024}, "sequence_length": 512},
    "model": {"width": 128, "layers": 4, "heads": 4},
    "training": TRAINING,
}
ELU_LEARNED = {"feature_map": "elu", "decay": "learned"}
CANDIDATES: dict[str, Mapping[str, str | int]] = {
    **candidates(),
    "window": {"kind": "window", "window": 64},
    "elu-learned-window": {"kind": "3linear+window", **ELU_LEARNED, "window": 64},
    "elu-learned-softmax": {"kind": "3linear+softmax", **ELU_LEARNED},
    "delta-softmax": {"kind": "3delta+softmax", "decay": "learned"},
    "delta-window": {"kind": "3delta+window", "decay": "learned", "window": 64},
    "elu-learned-ngram": {"kind": "linear+ngram+2linear", **ELU_LEARNED},
    "elu-channel-ngram": {"kind": "linear+ngram+2linear", "feature_map": "elu", "decay": "channel"},
    "delta-ngram": {"kind": "delta+ngram+2delta", "decay": "learned"},
    "delta-window-ngram": {"kind": "delta+ngram+delta+window", "decay": "learned", "window": 64},
}
BEYOND = 4  # most learning rates that are tried beyond the given ones


class Run(NamedTuple):
    attention: str
    rate: float
    seed: int
    bits_per_byte: float
    tokens_per_second: float
    parameters: int
    state_bytes: int  # after a training sequence


def train(name: str, rate: float, seed: int, options: argparse.Namespace) -> Run:
    """Train an attention, or resume or reuse its run."""
    attention = (candidates() | CANDIDATES)[name]  # those of plug-ins too
    changes: dict[str, Any] = {f"model.attention.{key}": value for key, value in attention.items()}
    changes |= {**options.changes, "training.learning_rate": rate, "seed": seed}
    recipe = lmlong.Recipe.load(RECIPE | {"plugins": options.plugin}, changes)
    print(f"{name}, learning rate {rate:g}, seed {seed}", file=sys.stderr)
    result = lmlong.train(recipe, options.out / f"{name}-{rate:g}-{seed}", resume="auto")
    losses = [entry.get("final_validation") or entry.get("validation") for entry in result.metrics]
    speeds = [entry["tokens_per_second"] for entry in result.metrics if "tokens_per_second" in entry]
    trained = lmlong.load(result.run, state_dtype="32")
    text = torch.zeros(1, recipe.text.sequence_length, dtype=torch.long, device=trained.device)
    size = lmlong.state_bytes(trained.model(text)[1])
    parameters = sum(weight.numel() for weight in trained.model.parameters())
    bits, speed = [loss["bits_per_byte"] for loss in losses if loss][-1], statistics.median(speeds)
    return Run(name, rate, seed, bits, speed, parameters, size)


def compare(name: str, options: argparse.Namespace) -> list[Run]:
    """Return the runs of an attention at its best learning rate, one for each seed."""
    tried = [train(name, rate, 0, options) for rate in sorted(options.rates)]
    while 1 < len(tried) < len(options.rates) + BEYOND:
        tried.sort(key=lambda run: run.rate)
        best = min(tried, key=lambda run: run.bits_per_byte)
        if best not in (tried[0], tried[-1]):
            break
        try:
            tried.append(train(name, best.rate * 2 if best is tried[-1] else best.rate / 2, 0, options))
        except lmlong.errors.DivergedError:
            break
    best = min(tried, key=lambda run: run.bits_per_byte)
    return [best, *(train(name, best.rate, seed, options) for seed in range(1, options.seeds))]


def write_copies(path: Path) -> str:
    """Write documents that are five times the same 100 random letters: only memory predicts the repetitions."""
    draw = random.Random(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ("".join(draw.choices(ascii_lowercase, k=100)) + "\n" for _ in range(4000))
    path.write_text("".join(json.dumps({"text": 5 * line}) + "\n" for line in lines), encoding="utf-8")
    return str(path)


def parse(word: str) -> tuple[str, Any]:
    """Return the key and the value of an option of a recipe."""
    key, _, value = word.partition("=")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"of {', '.join(CANDIDATES)} and plug-ins")
    parser.add_argument("--corpus", choices=("python-stdlib", "copies"), default="python-stdlib")
    parser.add_argument("--rates", nargs="+", type=float, default=[2e-3, 4e-3, 8e-3], help="learning rates")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", nargs="+", type=parse, default=[], metavar="KEY=VALUE", help="options of the recipe")
    parser.add_argument("--plugin", nargs="+", default=[], help="files of plug-ins, whose attentions --only may name")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"), help="folder with one for each corpus")
    options = parser.parse_args()
    options.changes, options.out = dict(options.set), options.out / options.corpus
    for plugin in options.plugin:
        lmlong.load_plugin(plugin)
    if unknown := {*(options.only or ())} - {*candidates(), *CANDIDATES}:
        parser.error(f"--only: {min(unknown)} is not one of {', '.join(candidates() | CANDIDATES)}.")
    if options.corpus == "copies":
        files = {"kind": "files", "paths": [write_copies(options.out / "copies.jsonl")]}
        options.changes |= {"text.sources": [files], "text.tokenizer": {"kind": "bytes"}}
    results = [compare(name, options) for name in options.only or CANDIDATES]
    results.sort(key=lambda runs: statistics.mean(run.bits_per_byte for run in runs))
    print(f"{'attention':20} bits/byte   spread     rate  parameters  tokens/s  state, KiB")
    for row, runs in enumerate(results):
        bits, first = [run.bits_per_byte for run in runs], runs[0]
        spread = statistics.stdev(bits) if len(bits) > 1 else 0.0
        speed = statistics.median(run.tokens_per_second for run in runs)
        print(
            f"{first.attention:20}{statistics.mean(bits):10.4f}{spread:9.4f}{first.rate:9g}{first.parameters:12,}"
            f"{speed:10,.0f}{first.state_bytes / 1024:12,.1f}"
        )
        plt.plot(bits, [-row] * len(bits), "o", color="C0")
        plt.plot(statistics.mean(bits), -row, "D", color="C1", fillstyle="none", markersize=11)
    plt.yticks([-row for row in range(len(results))], [runs[0].attention for runs in results])
    plt.locator_params(axis="x", nbins=5)
    plt.xlabel("bits per byte of each seed and their mean, less is better")
    plt.savefig(options.out / "compare.png", bbox_inches="tight")


if __name__ == "__main__":
    main()
