#!/usr/bin/env python
"""Why a mask does not make Linformer causal: change the last token of a text, and see whether the first output moves.

    python tools/show_linformer_leak.py

Linformer gets the mask one would write for it: the n places are cut into k equal parts, and query t may look at slot j
only where part j has begun by t, so that the first query sees a single slot. Causal linear attention gets the same
tokens.
"""

import argparse

import torch
from torch import Tensor

from lmlong import recipe
from lmlong.attention.encoder.linformer import Linformer
from lmlong.attention.registry import CAUSAL, ENCODER

TOKENS, SLOTS, HEADS, WIDTH = 64, 8, 2, 16


def masked_linformer(attention: Linformer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(mask(Q (E K)^T / sqrt(width))) F V."""
    keys, values, _ = attention.projections(k, v, None)
    begun = torch.arange(SLOTS) * (TOKENS // SLOTS) <= torch.arange(TOKENS)[:, None]  # (T, k)
    scores = (q @ keys.mT / WIDTH**0.5).masked_fill(~begun, -torch.inf)
    return scores.softmax(-1) @ values


def causal_linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    attention = CAUSAL["linear"](HEADS, WIDTH, WIDTH, recipe.Attention(decay="none"))
    y, _ = attention(q, k, v, attention.init_state(len(q), q.device, q.dtype))
    return y


def main() -> None:
    """Print the largest change of the first output for both."""
    torch.manual_seed(0)
    options = recipe.Attention(linformer=recipe.Linformer(projected=SLOTS))
    (linformer,) = ENCODER["linformer"]([TOKENS], HEADS, WIDTH, options)
    assert isinstance(linformer, Linformer)
    text = torch.randn(3, 1, HEADS, TOKENS, WIDTH)  # q, k and v
    other = text.clone()
    other[..., -1, :] = torch.randn(3, 1, HEADS, WIDTH)

    print(f"Largest change of the first of {TOKENS} outputs when the last token is another one:")
    with torch.no_grad():
        leak = masked_linformer(linformer, *text) - masked_linformer(linformer, *other)
        print(f"masked Linformer         {leak[:, :, 0].abs().max():.6g}")
        none = causal_linear(*text) - causal_linear(*other)
        print(f"causal linear attention  {none[:, :, 0].abs().max():.6g}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
