#!/usr/bin/env python
"""The error of random features (FAVOR+, Choromanski et al. 2021) against exact causal softmax attention.

    tools/experiments/approximation.py
    tools/experiments/approximation.py --seeds 10 --widths 16 --features 16 64 256
    tools/experiments/approximation.py --texts books/ --features 32 64 128 256

Positive, hyperbolic and trigonometric features of equal number, with orthogonal and independent rows of three kinds of
norm, on normal queries and keys of several sizes. Error is that of all outputs relative to their norm.

With --texts, in a model instead: one is trained with softmax attention, which FAVOR+ then replaces. The error is that
of the attention on the model's own queries and keys, the loss that of the model before and after --tune minutes more,
which softmax gets too, and the time that of a pass over a whole text. A finished run in --out is not trained again.
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
from lmlong.bench.timer import time_rounds
from lmlong.data.token_dataset import prepare
from lmlong.evaluation.state_health import watched

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


def swapped(options: argparse.Namespace) -> None:
    """Replace the attention of a trained softmax model by FAVOR+: print and draw errors, losses and times."""
    out = options.out.with_suffix("")
    model = {"width": 128, "layers": 4, "heads": 4, "query_key_norm": "head"}

    def trained(features: int, minutes: float, start: Path | None = None, **training: Any) -> lmlong.TrainingResult:
        kind = {"kind": "linear", "feature_map": "favor", "decay": "none", "favor": {"features": features}}
        text: dict[str, Any] = {"sources": [{"paths": [str(options.texts)]}], "sequence_length": 512}
        training = {"minutes": minutes, "clock": "process", "warmup_steps": 20, "validate_every": 10**9} | training
        if start:
            training = {"init_from": str(start), "learning_rate": 4e-3} | training
        recipe = {
            "text": text | {"tokenizer": {"vocabulary": 1024}},
            "model": model | {"attention": kind if features else {"kind": "softmax"}},
            "training": training | {"final_validation_tokens": 0},
        }
        name = "softmax" if start is None else f"{features or 'softmax'}-{minutes:g}"
        return lmlong.train(lmlong.Recipe.load(recipe), out / name, resume="auto")

    def loss(result: lmlong.TrainingResult) -> float:
        return [entry["validation"]["nats_per_token"] for entry in result.metrics if "validation" in entry][-1]

    softmax, inputs = trained(0, options.train), list[list[Tensor]]()
    run = lmlong.load(softmax.run)
    text = prepare(run.recipe.text, run.tokenizer).validation.tokens[: 2 * TOKENS].astype("int64")
    layers = [block.mixer.attention for block in run.model.blocks]
    with torch.no_grad(), watched(layers, lambda _, called: inputs.append([x.double() for x in called[:3]])):
        run.model(torch.from_numpy(text)[None])
    rows = {0: softmax} | {
        features: trained(features, 1, softmax.run, steps=1, learning_rate=1e-9) for features in options.features
    }
    untuned = {features: lmlong.load(result.run).model for features, result in rows.items()}
    print(f"{'features':8}{'error':>9}{'loss':>9}{'tuned':>9}  milliseconds of a pass over tokens")
    print(f"{'':37}{''.join(f'{length:>9,}' for length in options.lengths)}")
    _, (losses, times) = plt.subplots(1, 2, figsize=(10, 4))
    passes = {}
    for length in options.lengths:
        tokens = torch.randint(1024, (1, length))
        calls = {features: partial(each.eval(), tokens) for features, each in untuned.items()}
        with torch.no_grad():
            timed = time_rounds({str(features): call for features, call in calls.items()}, tokens.device, 10)
        passes[length] = {features: statistics.median(timed[str(features)][1:]) for features in calls}
    tuned = {features: loss(trained(features, options.tune, softmax.run)) for features in rows}
    for features, result in rows.items():
        errors = []
        for q, k, v in inputs if features else []:
            sizes, setting = q.shape[1:4:2], Setting(q.shape[-1], 0, features)
            shape, drawn = (sizes[0], sizes[1], sizes[1]), torch.stack([draw_rows(setting, n) for n in range(sizes[0])])
            exact = lmlong.SoftmaxAttention(*shape).reference(q, k, v)
            random = lmlong.LinearAttention(*shape, feature_map=RandomFeatures(drawn, "positive")).reference(q, k, v)
            errors.append(float((random - exact).norm() / exact.norm()))
        error = statistics.mean(errors) if errors else 0.0
        cells = "".join(f"{passes[length][features] * 1e3:9.1f}" for length in options.lengths)
        print(f"{features or 'softmax':<8}{error:9.3f}{loss(result):9.4f}{tuned[features]:9.4f}  {cells}")
        label = str(features or "softmax")
        times.loglog(options.lengths, [passes[length][features] for length in options.lengths], "o-", label=label)
    losses.plot(options.features, [loss(rows[features]) for features in options.features], "o-", label="swapped")
    losses.plot(options.features, [tuned[features] for features in options.features], "o-", label="tuned")
    for value, name in ((loss(softmax), "softmax"), (tuned[0], "softmax, tuned")):
        losses.axhline(value, color="gray", linestyle="-" if name == "softmax" else ":", label=name)
    losses.set(xlabel="features", ylabel="nats a token", xscale="log")
    times.set(xlabel="tokens", ylabel="seconds of a pass")
    for panel in (losses, times):
        panel.legend()
    plt.savefig(options.out, bbox_inches="tight")


def short(error: float) -> str:
    return f"{error:.3f}" if error < 1000 else f"{error:.0e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40, help="draws of inputs and features")
    parser.add_argument("--widths", nargs="+", type=int, default=[16, 64], help="of a head")
    parser.add_argument("--deviations", nargs="+", type=float, default=[0.25, 0.5, 0.75, 1.0, 1.25, 1.5])
    parser.add_argument("--features", nargs="+", type=int, default=[16, 32, 64, 128, 256])
    parser.add_argument("--texts", type=Path, help="folder of texts, to replace the attention of a trained model")
    parser.add_argument("--train", type=float, default=2, help="minutes of processor time of the softmax model")
    parser.add_argument("--tune", type=float, default=0.5, help="minutes of processor time after the replacement")
    parser.add_argument("--lengths", nargs="+", type=int, default=[256, 512, 1024, 2048, 4096], help="tokens of passes")
    parser.add_argument("--out", type=Path, default=Path("approximation.png"), help="the picture, and a folder of runs")
    options = parser.parse_args()
    if options.texts:
        swapped(options)
        return
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
