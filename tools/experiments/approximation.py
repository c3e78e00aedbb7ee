#!/usr/bin/env python
"""The error of random features (FAVOR+, Choromanski et al. 2021) against exact causal softmax attention.

    tools/experiments/approximation.py
    tools/experiments/approximation.py --seeds 10 --widths 16 --features 16 64 256

Positive, hyperbolic and trigonometric features of equal number, with orthogonal and independent rows of three kinds of
norm, on normal queries and keys of several sizes. Error is that of all outputs relative to their norm.
"""

import argparse
import math
import statistics
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from torch import Tensor

import lmlong

TOKENS = 128
FORMS, NORMS = ("positive", "hyperbolic", "trig"), ("chi", "fixed", "quantile")


class Setting(NamedTuple):
    width: int
    deviation: float  # of the entries of queries and keys
    features: int
    form: str = "positive"
    norms: str = "chi"
    orthogonal: bool = True


class RandomFeatures(lmlong.FeatureMap):
    """One of the three forms as in its paper, but for a constant factor, which cancels."""

    def __init__(self, rows: Tensor, form: str):
        super().__init__(rows.shape[-2] * (1 if form == "positive" else 2))
        self.rows, self.form = rows, form

    def query(self, q: Tensor) -> Tensor:
        x = q * q.shape[-1] ** -0.25
        u, half_square = x @ self.rows.mT, x.square().sum(-1, keepdim=True) / 2
        if self.form == "trig":
            return torch.cat([u.cos(), u.sin()], dim=-1) * half_square.exp()
        return (torch.cat([u, -u], dim=-1) if self.form == "hyperbolic" else u).sub(half_square).exp()


def draw_rows(setting: Setting, seed: int) -> Tensor:
    """Return random rows: directions, orthogonal within each block of `width` of them, times lengths."""
    draw, width = torch.Generator().manual_seed(1_000_003 + seed), setting.width
    count, blocks = setting.features // (1 if setting.form == "positive" else 2), []
    normal = partial(torch.randn, generator=draw, dtype=torch.float64)
    for begin in range(0, count, width):
        block = normal(width, width)
        if setting.orthogonal:
            block, triangle = torch.linalg.qr(block)
            block *= triangle.diagonal().sign()
        blocks.append((block / block.norm(dim=1, keepdim=True))[: count - begin])
    if setting.norms == "chi":
        lengths = normal(count, width).norm(dim=1)
    elif setting.norms == "fixed":
        lengths = torch.full((count,), math.sqrt(width), dtype=torch.float64)
    else:  # quantiles of the lengths of many normal vectors, shuffled
        shares = torch.arange(1, count + 1, dtype=torch.float64) / (count + 1)
        many = torch.randn(100_000, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        lengths = many.norm(dim=1).quantile(shares)[torch.randperm(count, generator=draw)]
    return torch.cat(blocks) * lengths[:, None]


def draw_inputs(setting: Setting, seed: int) -> list[Tensor]:
    """Return queries, keys and values (1, TOKENS, width), the same for every form."""
    draws = [torch.Generator().manual_seed(3 * seed + part) for part in range(3)]
    drawn = [torch.randn(1, TOKENS, setting.width, generator=draw, dtype=torch.float64) for draw in draws]
    return [drawn[0] * setting.deviation, drawn[1] * setting.deviation, drawn[2]]


def measure(setting: Setting, seeds: int) -> list[float]:
    """Return the lower quartile, the median and the upper quartile of the error, over draws of inputs and rows."""
    q, k, v = map(torch.stack, zip(*(draw_inputs(setting, seed) for seed in range(seeds)), strict=True))
    rows = torch.stack([draw_rows(setting, seed) for seed in range(seeds)])[:, None]
    sizes, features = (1, setting.width, setting.width), RandomFeatures(rows, setting.form)
    exact = lmlong.SoftmaxAttention(*sizes).reference(q, k, v)
    error = lmlong.LinearAttention(*sizes, feature_map=features).reference(q, k, v) - exact
    errors = error.flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)
    return errors.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()


def short(error: float) -> str:
    return f"{error:.3f}" if error < 1000 else f"{error:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40, help="draws of inputs and features")
    parser.add_argument("--widths", nargs="+", type=int, default=[16, 64], help="of a head")
    parser.add_argument("--deviations", nargs="+", type=float, default=[0.25, 0.5, 0.75, 1.0, 1.25, 1.5])
    parser.add_argument("--features", nargs="+", type=int, default=[16, 32, 64, 128, 256])
    parser.add_argument("--out", type=Path, default=Path("approximation.png"), help="the picture")
    options = parser.parse_args()
    cases, most = list(product(options.widths, options.deviations)), max(options.features)
    size = len(options.widths), len(options.deviations)
    shared: dict[str, Any] = {"sharex": True, "sharey": True, "squeeze": False, "layout": "constrained"}
    _, panels = plt.subplots(*size, **shared, figsize=(2.4 * size[1] + 1, 3 * size[0]))
    print(
        f"relative error with {most} features, median over {options.seeds} draws; gain: error of independent rows over"
    )
    print("that of orthogonal ones, positive, chi, the median over all numbers of features\n")
    print(f"{'':14}{'orthogonal rows, chi norms':<34}{'':6}positive, orthogonal")
    print(
        f"width  inputs{'positive':>10}{'hyperbolic':>11}{'trig':>8}  {'winner':11}  gain{'fixed':>8}{'quantile':>10}"
    )
    for (width, deviation), panel in zip(cases, panels.flat, strict=True):
        gains = []
        for form, orthogonal in product(FORMS, (True, False)):
            settings = [Setting(width, deviation, m, form, "chi", orthogonal) for m in options.features]
            low, middle, high = zip(*(measure(setting, options.seeds) for setting in settings), strict=True)
            gains.append(middle)
            color = f"C{FORMS.index(form)}"
            look, label = ("o-", form) if orthogonal else (":", f"{form}, independent")
            panel.semilogx(options.features, middle, look, base=2, color=color, label=label)
            if orthogonal:
                panel.fill_between(options.features, low, high, color=color, alpha=0.2)
        of_form = {form: gains[2 * number][-1] for number, form in enumerate(FORMS)}
        gain = statistics.median(independent / orthogonal for orthogonal, independent in zip(*gains[:2], strict=True))
        fixed, quantile = (
            measure(Setting(width, deviation, most, "positive", norms), options.seeds)[1] for norms in NORMS[1:]
        )
        panel.set(title=f"width {width}, inputs {deviation:g}", xlabel="features", yscale="log", ylim=(None, 3))
        print(
            f"{width:5}{deviation:8.2f}{of_form['positive']:10.3f}{of_form['hyperbolic']:11.3f}{short(of_form['trig']):>8}"
            f"  {min(of_form, key=of_form.__getitem__):11}{gain:6.3f}{fixed:8.3f}{quantile:10.3f}"
        )
    panels[0][-1].legend(loc="lower right")
    plt.savefig(options.out, bbox_inches="tight")


if __name__ == "__main__":
    main()
