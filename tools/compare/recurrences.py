#!/usr/bin/env python
"""Recurrences, ours beside flash-linear-attention's plain forms of them: outputs, state and gradients.

    pip install flash-linear-attention
    python tools/compare/recurrences.py

They are the delta rule, and linear attention with a decay for each channel, whose z is one more column of values there.
Both sides get the same features, values, gates and state. Its plain forms are loops over tokens in torch, in float32,
so they run anywhere; documents they do not know, so there is one. The exit status is 1 where anything differs by more
than rounding, relative to the largest number.
"""

import argparse
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
from fla.ops.gla.naive import naive_recurrent_gla
from torch import Tensor
from torch.nn.functional import normalize, pad

from lmlong.attention.delta.layer import DeltaAttention
from lmlong.attention.feature_maps import FeatureMap
from lmlong.attention.linear.layer import LinearAttention
from lmlong.attention.scan import Kernel, Scan
from lmlong.recipe.lengths import name_length, parse_lengths

ROWS, HEADS, KEYS, VALUES = 2, 4, 64, 48
AGREES = 1e-5
ARGUMENTS = ("S", "q", "k", "v", "document_starts", "log_decay", "beta")
"""Of the scan, in their order."""


class Identity(FeatureMap):
    """The map of queries and keys that are features already."""

    def query(self, q: Tensor) -> Tensor:
        return q


Inputs = dict[str, Tensor]
Rule = Callable[[Inputs], tuple[Tensor, Tensor]]
"""From the inputs to outputs (B, H, T, V) and the state after, z its last column where there is one."""


class Recurrence(NamedTuple):
    draw: Callable[[int], Inputs]
    theirs: Rule
    ours: dict[str, Rule]


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(ROWS, HEADS, *shape, generator=generator)


def draw_delta(length: int, decays: bool) -> Inputs:
    """Draw inputs as a model makes them: gates from almost closed to almost open."""
    of = torch.Generator().manual_seed(length)
    q, k = (normalize(normal(of, length, KEYS), dim=-1) for _ in range(2))
    log_decay, beta = (3 * normal(of, length) + 3).sigmoid().log() * decays, (3 * normal(of, length)).sigmoid()
    return {
        "q": q,
        "k": k,
        "v": normal(of, length, VALUES),
        "log_decay": log_decay,
        "beta": beta,
        "S": normal(of, KEYS, VALUES),
    }


def draw_linear(length: int) -> Inputs:
    of = torch.Generator().manual_seed(length)
    q, k = (normal(of, length, KEYS).exp() for _ in range(2))
    log_decay = (3 * normal(of, length, KEYS) + 3).sigmoid().log()
    S = torch.cat([normal(of, KEYS, VALUES), normal(of, KEYS, 1).exp()], dim=-1)
    return {"q": q, "k": k, "v": normal(of, length, VALUES), "log_decay": log_decay, "S": S}


def delta_by_fla(x: Inputs) -> tuple[Tensor, Tensor]:
    of_token = {name: x[name].transpose(1, 2) for name in ("q", "k", "v", "beta")}
    y, S = naive_recurrent_gated_delta_rule(
        **of_token, g=x["log_decay"].transpose(1, 2), scale=1.0, initial_state=x["S"], output_final_state=True
    )
    return y.transpose(1, 2), S


def linear_by_fla(x: Inputs) -> tuple[Tensor, Tensor]:
    q, k, v, gates = (x[name].transpose(1, 2) for name in ("q", "k", "v", "log_decay"))
    n, S = naive_recurrent_gla(q, k, pad(v, (0, 1), value=1), gates, x["S"], output_final_state=True)
    return (n[..., :-1] / n[..., -1:]).transpose(1, 2), S  # its scale of queries cancels


def ours(kernel: type[Kernel]) -> Rule:
    """Return the scan of a kernel, from features."""

    def rule(x: Inputs) -> tuple[Tensor, Tensor]:
        return Scan.apply(kernel(), Identity(KEYS), True, *(x.get(name) for name in ARGUMENTS))[:2]

    return rule


def results(rule: Rule, x: Inputs, slopes: list[Tensor]) -> Inputs:
    """Return outputs, the state after, and all gradients."""
    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
    y, S = rule(leaves)
    grads = torch.autograd.grad((y, S), list(leaves.values()), slopes)
    return {"y": y.detach(), "S after": S.detach(), **{f"d{name}": one for name, one in zip(x, grads, strict=True)}}


DELTA, LINEAR = (
    {name: ours(attention.kernels[name]) for name in ("native", "torch")}
    for attention in (DeltaAttention, LinearAttention)
)
RECURRENCES = {
    "delta": Recurrence(lambda length: draw_delta(length, False), delta_by_fla, DELTA),
    "delta, decaying": Recurrence(lambda length: draw_delta(length, True), delta_by_fla, DELTA),
    "linear, a decay for each channel": Recurrence(draw_linear, linear_by_fla, LINEAR),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=parse_lengths, default=parse_lengths("1,64,1000"))
    worst = 0.0
    print(f"{ROWS} rows, {HEADS} heads, keys of {KEYS}, values of {VALUES}, float32: largest differences\n")
    for length in parser.parse_args().lengths:
        for what, (draw, theirs, ours) in RECURRENCES.items():
            x = draw(length)
            generator = torch.Generator().manual_seed(0)
            slopes = [torch.randn(x[name].shape, generator=generator) for name in ("v", "S")]
            truth = results(theirs, x, slopes)
            for engine, rule in ours.items():
                mine = results(rule, x, slopes)
                off = {key: float((mine[key] - t).abs().max() / t.abs().max()) for key, t in truth.items()}
                worst = max(worst, *off.values())
                told = ", ".join(f"{key} {one:.0e}" for key, one in off.items())
                print(f"{name_length(length)} tokens, {what}, {engine}: {told}")
    print(f"\nworst {worst:.1e}, allowed {AGREES:.0e}")
    sys.exit(worst > AGREES)


if __name__ == "__main__":
    main()
