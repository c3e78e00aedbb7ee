#!/usr/bin/env python
"""Multi-query associative recall (Arora et al. 2023): how many key-value pairs fit into a state of which width?

    tools/experiments/recall.py
    tools/experiments/recall.py --only elu elu-learned --pairs 8 16 32 --vocabulary 128
    tools/experiments/recall.py --pairs 4 8 16 32 64 --widths 64 128 256 --vocabulary 8192 \\
        --rates 4e-3 2e-3 1e-3 --steps 20000 --queries 2048             as large as in the paper, for a GPU

A row lists keys, each with its value, and then asks for the value of every key. Models of two layers and one head are
trained on such rows at each learning rate, until one recalls everything; the best is shown. Each training has a folder
in --out: a finished one is not trained again, an interrupted one is resumed.
"""

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import lmlong
from lmlong.recipe.kinds import candidates
from lmlong.training.optimizer import LoopOptimizer, learning_rate_factor, set_learning_rate

FILLER, IGNORED = 0, -100
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # of AdamW
TESTS = 16  # batches of the test: those after the last training step


def make_rows(pairs: int, step: int, options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, which are IGNORED but at the queries.

    The pairs come first. In the rest every second position may hold a query, so that a filler follows it and never its
    answer. Most queries are near the pairs: log weights of a power law + Gumbel noise, the largest of them.
    """
    rows, length, half = -(-options.queries // pairs), options.tokens_per_pair * pairs, options.vocabulary // 2
    draw = np.random.default_rng((options.seed, step, pairs))
    halves = np.arange(FILLER + 1, half), np.arange(half, options.vocabulary)
    keys, values = (of[draw.random((rows, len(of))).argsort(axis=1)[:, :pairs]] for of in halves)
    tokens, targets = np.full((rows, length), FILLER), np.full((rows, length), IGNORED)
    tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, values
    distances = 0.99 * np.log(np.arange(1, (length - 2 * pairs) // 2 + 1))
    drawn = (distances - draw.gumbel(size=(rows, len(distances)))).argsort(axis=1)[:, :pairs]
    np.put_along_axis(tokens, 2 * pairs + 2 * drawn, keys, axis=1)
    np.put_along_axis(targets, 2 * pairs + 2 * drawn, values, axis=1)
    return torch.tensor(tokens, device=options.device), torch.tensor(targets, device=options.device)


def build(name: str, width: int, options: argparse.Namespace) -> lmlong.LanguageModel:
    """Return a model whose state is as wide as the model; a window has about the state of linear attention. The short
    convolution sees a key beside its value, so positions are not needed."""
    attention = {**candidates()[name], "window": 1 + width // 2}
    model = {"width": width, "layers": 2, "heads": 1, "positions": "none", "attention": attention}
    torch.manual_seed(options.seed)
    return lmlong.LanguageModel(lmlong.recipe.Model.model_validate(model), options.vocabulary).to(options.device)


def train(model: lmlong.LanguageModel, rate: float, checkpoint: Path, options: argparse.Namespace) -> None:
    """Train by AdamW with a warm-up and a cosine schedule, from the checkpoint if there is one."""
    training = lmlong.recipe.Training(optimizer="adamw", learning_rate=rate, warmup_steps=max(1, options.steps // 10))
    optimizer, begin = LoopOptimizer(model, training), 0
    if checkpoint.exists():
        tensors = load_file(checkpoint)
        begin = int(tensors["step"])
        model.load_state_dict({name: tensors[f"model.{name}"] for name in model.state_dict()})
        moments = {n: {kind: tensors[f"{n}.{kind}"] for kind in MOMENTS} for n, _ in enumerate(model.parameters())}
        optimizer.weights.load_state_dict({**optimizer.weights.state_dict(), "state": moments})
    for step in range(begin, options.steps):
        set_learning_rate(optimizer.weights, rate * learning_rate_factor(step, options.steps, training))
        for pairs in options.pairs:
            tokens, targets = make_rows(pairs, step, options)
            loss = model.loss(model(tokens)[0], targets)
            (loss / (targets != IGNORED).sum() / len(options.pairs)).backward()
        optimizer.step()
        if (step + 1) % 100 == 0:
            new = checkpoint.with_suffix(".new")
            tensors = {f"model.{name}": x for name, x in model.state_dict().items()} | {"step": torch.tensor(step + 1)}
            for number, state in optimizer.weights.state_dict()["state"].items():
                tensors |= {f"{number}.{kind}": x for kind, x in state.items()}
            save_file({name: x.contiguous() for name, x in tensors.items()}, new)
            new.replace(checkpoint)


@torch.inference_mode()
def score(model: lmlong.LanguageModel, pairs: int, options: argparse.Namespace) -> float:
    """Return the share of the test's queries that are answered."""
    rows = [make_rows(pairs, options.steps + test, options) for test in range(TESTS)]
    right = [(model.logits(model(x)[0]).argmax(-1) == y)[y != IGNORED] for x, y in rows]
    return float(torch.cat(right).float().mean())


def run(name: str, width: int, rate: float, options: argparse.Namespace) -> dict[str, Any]:
    """Return the result of a training, which is done once."""
    folder = options.out / f"{name}-{width}-{rate:g}"
    done = folder / "result.json"
    if not done.exists():
        folder.mkdir(exist_ok=True)
        model = build(name, width, options)
        train(model, rate, folder / "checkpoint.safetensors", options)
        row, _ = make_rows(max(options.pairs), 0, options)
        state = lmlong.state_bytes(model(row[:1])[1])
        recalled = [score(model, pairs, options) for pairs in options.pairs]
        done.write_text(json.dumps({"rate": rate, "state_bytes": state, "recalled": recalled}))
    return json.loads(done.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = ["softmax", "window", "elu", "elu-learned", "favor"]
    parser.add_argument("--only", nargs="+", choices=candidates(), default=usual, metavar="NAME", help="attentions")
    parser.add_argument("--pairs", nargs="+", type=int, default=[4, 8, 16], help="each model trains on all of them")
    parser.add_argument("--widths", nargs="+", type=int, default=[16, 32, 64], help="of the state")
    parser.add_argument("--rates", nargs="+", type=float, default=[8e-3, 4e-3], help="learning rates to choose from")
    parser.add_argument("--vocabulary", type=int, default=64, help="half of it are keys, half values")
    parser.add_argument("--tokens-per-pair", type=int, default=4, help="in longer rows queries are further away")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--queries", type=int, default=128, help="in a step, for each number of pairs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/recall"), help="folder of the runs and of recall.png")
    options = parser.parse_args()
    alike = ("pairs", "vocabulary", "tokens_per_pair", "steps", "queries", "seed")
    asked, path = json.dumps({name: vars(options)[name] for name in alike}), options.out / "options.json"
    options.out.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.read_text() != asked:
        parser.error(f"{path}: its trainings have other options. Choose another --out.")
    path.write_text(asked)
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)  # for products this small, more threads mostly wait for each other
    print("attention         width  state, KiB    rate" + "".join(f"{pairs:6}" for pairs in options.pairs) + "  pairs")
    for name, width in product(options.only, options.widths):
        tried: list[dict[str, Any]] = []
        while len(tried) < len(options.rates) and not (tried and min(tried[-1]["recalled"]) == 1):
            tried.append(run(name, width, options.rates[len(tried)], options))
        best = max(tried, key=lambda one: sum(one["recalled"]))
        shares = "".join(f"{share:6.3f}" for share in best["recalled"])
        print(f"{name:18}{width:5}{best['state_bytes'] / 1024:12.1f}{best['rate']:8g}{shares}", flush=True)
        plt.semilogx(options.pairs, best["recalled"], "o-", base=2, label=f"{name}, width {width}")
    plt.legend()
    plt.gca().set(xlabel="pairs", ylabel="share of queries answered")
    plt.savefig(options.out / "recall.png")


if __name__ == "__main__":
    main()
