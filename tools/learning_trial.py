#!/usr/bin/env python
"""Measure what learning while reading gains on texts, from a model's hidden states alone.

    tools/learning_trial.py RUN TEXT... [--tokens 65536] [--step 1] [--bias 0.05] [--decay 0.0005]

Prints bits per byte without and with learning. Each block of 16 tokens is predicted before it is learned from.

T time in a block, V vocabulary.
"""

import argparse
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import lmlong

BLOCK = 16


class Learned(NamedTuple):
    """What was learned from a document, beside the output layer."""

    layer: Tensor  # (V, width)
    bias: Tensor  # (V,)
    scale: float = 0.25  # of the learned logits
    curvature: float = 30.0  # of the loss by the scale, summed


class Rates(NamedTuple):
    step: float
    bias: float
    decay: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--tokens", type=int, default=65536)
    for name, default in {"step": 1.0, "bias": 0.05, "decay": 0.0005}.items():
        parser.add_argument(f"--{name}", type=float, default=default)
    options = parser.parse_args()
    model = lmlong.load(options.run)
    weight = model.model.lm_head.weight.detach().float()
    token_bytes = torch.from_numpy(model.tokenizer.token_bytes)
    rates = Rates(options.step, options.bias, options.decay)
    print("text\ttokens\tplain\tlearned\tscale")
    with torch.inference_mode():
        for path in options.texts:
            hidden = model.hidden_states(path.read_text())
            end = options.tokens + 1  # bos comes first
            learned = Learned(torch.zeros_like(weight), weight.new_zeros(len(weight)))
            nats, learned_nats, tokens, size = 0.0, 0.0, 0, 0
            for states, targets in blocks(hidden.last[:end], hidden.tokens[:end]):
                logits = states @ weight.T
                nats += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
                loss, learned = step(logits, states, targets, learned, rates)
                learned_nats += loss
                tokens, size = tokens + len(targets), size + int(token_bytes[targets].sum())
            plain, adapted = (x / math.log(2) / size for x in (nats, learned_nats))
            print(f"{path.name}\t{tokens}\t{plain:.4f}\t{adapted:.4f}\t{learned.scale:.2f}", flush=True)


def step(logits: Tensor, hidden: Tensor, targets: Tensor, learned: Learned, rates: Rates) -> tuple[float, Learned]:
    """Return the loss of a block in nats and what is learned after it."""
    change = hidden @ learned.layer.T + learned.bias
    log_p = (logits + learned.scale * change).log_softmax(-1)
    p = log_p.exp()
    error = p - torch.nn.functional.one_hot(targets, len(learned.bias))
    kept = 1 - rates.decay
    slope = (error * change).sum().item()
    mean = (p * change).sum(-1)
    curvature = kept * learned.curvature + ((p * change.square()).sum(-1) - mean.square()).sum().item()
    after = Learned(
        kept * learned.layer - rates.step * error.T @ (hidden / hidden.square().sum(-1, keepdim=True)),
        kept * learned.bias - rates.bias * error.sum(0),
        min(2.0, max(0.0, learned.scale - slope / curvature)),
        curvature,
    )
    return -log_p.gather(1, targets[:, None]).sum().item(), after


def blocks(last: Tensor, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the blocks of a text: hidden states (T, width) and the tokens that follow them."""
    return list(zip(last[:-1].float().split(BLOCK), tokens[1:].split(BLOCK), strict=True))


if __name__ == "__main__":
    main()
