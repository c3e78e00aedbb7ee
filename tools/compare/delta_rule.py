#!/usr/bin/env python
"""The delta rule, ours beside flash-linear-attention's plain form of it: outputs, state and gradients.

    pip install flash-linear-attention
    python tools/compare/delta_rule.py

Both get the same unit queries and keys, values, gates and state. Its plain form is a loop over tokens in torch, in
float32, so it runs anywhere; documents it does not know, so there is one. The exit status is 1 where anything differs
by more than rounding, relative to the largest number.
"""

import argparse
import sys
from collections.abc import Callable

import torch
from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule
from torch import Tensor
from torch.nn.functional import normalize

from lmlong.attention.delta import chunk, native
from lmlong.attention.delta.chunk import Scan
from lmlong.attention.scan import IdentityFeatures, ScanInputs
from lmlong.recipe.lengths import name_length, parse_lengths

ROWS, HEADS, KEYS, VALUES = 2, 4, 64, 48
AGREES = 1e-5
OURS: dict[str, Scan] = {"native": native.scan, "torch": chunk.scan}

Inputs = dict[str, Tensor]
Rule = Callable[[Inputs], tuple[Tensor, Tensor]]
"""From the inputs to outputs (B, H, T, V) and the state after (B, H, K, V)."""


def draw(length: int, decays: bool) -> Inputs:
    """Draw inputs as a model makes them: gates from almost closed to almost open."""
    generator = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(ROWS, HEADS, *shape, generator=generator)

    q, k = (normalize(normal(length, KEYS), dim=-1) for _ in range(2))
    log_decay = (3 * normal(length) + 3).sigmoid().log() * decays
    x = {"q": q, "k": k, "v": normal(length, VALUES), "log_decay": log_decay, "beta": (3 * normal(length)).sigmoid()}
    return {name: t.requires_grad_() for name, t in {**x, "S": normal(KEYS, VALUES)}.items()}


def by_fla(x: Inputs) -> tuple[Tensor, Tensor]:
    of_token = {name: x[name].transpose(1, 2) for name in ("q", "k", "v", "beta")}
    y, S = naive_recurrent_gated_delta_rule(
        **of_token, g=x["log_decay"].transpose(1, 2), scale=1.0, initial_state=x["S"], output_final_state=True
    )
    return y.transpose(1, 2), S


def by_lmlong(scan: Scan, x: Inputs) -> tuple[Tensor, Tensor]:
    return scan(IdentityFeatures(), ScanInputs(x["q"], x["k"], x["v"], None, x["log_decay"], x["beta"]), x["S"])


def results(rule: Rule, x: Inputs, slopes: list[Tensor]) -> Inputs:
    """Return outputs, the state after, and all gradients."""
    y, S = rule(x)
    grads = torch.autograd.grad((y, S), list(x.values()), slopes)
    return {"y": y.detach(), "S after": S.detach(), **{f"d{name}": grad for name, grad in zip(x, grads, strict=True)}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=parse_lengths, default=parse_lengths("1,64,1000"))
    worst = 0.0
    print(f"{ROWS} rows, {HEADS} heads, keys of {KEYS}, values of {VALUES}, float32: largest differences\n")
    for length in parser.parse_args().lengths:
        for decays in (False, True):
            x = draw(length, decays)
            generator = torch.Generator().manual_seed(0)
            slopes = [torch.randn(t.shape, generator=generator) for t in (x["v"], x["S"])]
            theirs = results(by_fla, x, slopes)
            for name, scan in OURS.items():
                ours = results(lambda x, scan=scan: by_lmlong(scan, x), x, slopes)
                off = {key: float((ours[key] - t).abs().max() / t.abs().max()) for key, t in theirs.items()}
                worst = max(worst, *off.values())
                gate = "decaying" if decays else "kept"
                told = ", ".join(f"{key} {one:.0e}" for key, one in off.items())
                print(f"{name_length(length)} tokens, {gate}, {name}: {told}")
    print(f"\nworst {worst:.1e}, allowed {AGREES:.0e}")
    sys.exit(worst > AGREES)


if __name__ == "__main__":
    main()
