#!/usr/bin/env python
"""Pretrain encoders on masked tokens of a folder of texts, then learn labels from them, by kind of attention.

    tools/experiments/encoders.py books/ --kinds full linformer-64 linformer-64-mean linformer-128,64,32,16 --seeds 0 1
    tools/experiments/encoders.py books/ --kinds full full-scratch causal runs/masked --labelled reviews.jsonl

A kind is an attention, for Linformer with k, or a k for each layer, and then a projection or what shares projections.
Each is pretrained for equal time (a causal one by its next tokens, one named -scratch not at all), at a constant rate
until the last quarter; the loss at equal steps is that of a checkpoint before. Errors are over held-out rows, those of
differences over the same rows. A kind may also be the folder of a pretrained run. Then each is tuned on each fold of
the labelled documents, which are shuffled and divided into --folds parts: trained on the others, measured on the fold
after the last step, which no choice depends on. Naive Bayes by words gets the same folds. Each training is a run folder
in --out: a finished one is not trained again, an interrupted one is resumed.
"""

import argparse
import json
import math
import random
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

import lmlong
from lmlong.data.token_dataset import prepare
from lmlong.evaluation.document_sums import Sums
from lmlong.evaluation.masked import measure_masked
from lmlong.evaluation.spectrum import measure_spectra
from lmlong.inference.loading import open_run

FIRST = 128
"""Singular values whose share of the sum is shown, as in the Linformer paper."""
HELD_OUT = 100_000
"""Tokens of held-out text."""


def attention_of(kind: str) -> dict[str, Any]:
    """Return the attention of a kind, such as full, linformer-128, linformer-128-mean or linformer-64,32-none."""
    name, *options = kind.removesuffix("-scratch").split("-", 2)
    if name != "linformer":
        return {"kind": "linear" if name == "causal" else name}
    slots, *rest = options
    named = {"projection" if word in ("linear", "mean", "max", "conv") else "sharing": word for word in rest}
    by_layer = [int(k) for k in slots.split(",")]
    return {"kind": "linformer", "linformer": {"projected": by_layer if by_layer[1:] else by_layer[0], **named}}


def recipe_of(kind: str, objective: str, seed: int, options: argparse.Namespace, **text: Any) -> dict[str, Any]:
    """Return the sections that all trainings share."""
    model = {"width": options.width, "layers": options.layers, "heads": options.width // 32}
    training: dict[str, Any] = {"minutes": options.pretrain, "learning_rate": options.rate, "decay_fraction": 0.25}
    training |= {"schedule": "warmup-stable-decay", "checkpoint_every": options.steps, "keep_every": options.steps}
    if objective == "label":
        training = {"minutes": options.tune, "learning_rate": options.tuning_rate, "optimizer": "adamw"}
    return {
        "objective": objective,
        "seed": seed,
        "text": {"tokenizer": {"vocabulary": options.vocabulary}, "sequence_length": options.length, **text},
        "model": {**model, "dropout": options.dropout, "attention": attention_of(kind)},
        "training": {
            "clock": "process",
            "batch_size": max(options.batch // options.length, 1),
            "warmup_steps": 20,
            "early_stopping": False,
            "validate_every": 10**9,  # only after the last step, so that no checkpoint is chosen by the held-out text
            **training,
        },
    }


def trained(recipe: dict[str, Any], folder: Path) -> lmlong.TrainingResult:
    """Train, or resume or reuse the run in a folder."""
    print(folder.name, file=sys.stderr)
    return lmlong.train(lmlong.Recipe.load(recipe), folder, resume="auto")


def pretrain(kind: str, seed: int, options: argparse.Namespace) -> tuple[int, list[Sums]]:
    """Pretrain a kind; return its steps, and for an encoder its sums over held-out rows at equal steps and time."""
    text: dict[str, Any] = {"sources": [{"paths": [str(options.texts)]}]}
    if kind != "causal":
        text["masking"] = {"kind": "plain", "share": options.masked}
    folder = options.out / f"{kind}-{seed}"
    result = trained(recipe_of(kind, "causal" if kind == "causal" else "masked", seed, options, **text), folder)
    steps = [min(options.steps, result.step), result.step] if kind != "causal" else []
    runs = (open_run(folder / "checkpoints" / f"step-{step:08}") for step in steps)
    return result.step, [measure_masked(folder.name, run, tokens=HELD_OUT).sums for run in runs]


def shares(kind: str, seed: int, options: argparse.Namespace) -> list[float]:
    """Return the share of the sum that the first singular values of attention hold, by layer."""
    run = open_run(options.out / f"{kind}-{seed}")
    text = prepare(run.recipe.text, run.tokenizer).validation
    (spectrum,) = measure_spectra(kind, run, text, [options.length])
    return [float(layer.cumulative[:, min(FIRST, layer.values) - 1].mean()) for layer in spectrum.layers]


def tune(kind: str, fold: int, options: argparse.Namespace) -> float:
    """Return the accuracy on a fold of a model that learned the labels of the others."""
    files = [{"paths": [str(options.out / f"fold-{fold}-{part}.jsonl")]} for part in ("train", "test")]
    text, run = {"sources": files[:1], "validation": {"sources": files[1:]}}, Path(kind)
    recipe = recipe_of("full" if run.is_dir() else kind, "label", options.seeds[0], options, **text)
    recipe["model"]["encoder"] = not kind.startswith("causal")
    if run.is_dir():
        recipe["model"] = {"encoder": True}
    if not kind.endswith("-scratch"):
        recipe["training"]["init_from"] = str(run if run.is_dir() else options.out / f"{kind}-{options.seeds[0]}")
    metrics = trained(recipe, options.out / f"{run.name}-fold-{fold}").metrics
    return [entry["validation"]["accuracy"] for entry in metrics if "validation" in entry][-1]


def write_folds(options: argparse.Namespace) -> list[tuple[list[Any], list[Any]]]:
    """Write the records of all labelled files in folds, the labels in turn; return them as (train, test)."""
    records = [json.loads(line) for path in options.labelled for line in path.read_text().splitlines()]
    random.Random(0).shuffle(records)
    records.sort(key=lambda record: str(record["label"]))
    folds = []
    for fold in range(options.folds):
        parts = {"train": [r for n, r in enumerate(records) if n % options.folds != fold]}
        parts["test"] = records[fold :: options.folds]
        for name, part in parts.items():
            path = options.out / f"fold-{fold}-{name}.jsonl"
            text = "".join(json.dumps(record) + "\n" for record in part)
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
        folds.append((parts["train"], parts["test"]))
    return folds


def naive_bayes(train: list[Any], test: list[Any]) -> float:
    """Return the accuracy of multinomial Naive Bayes by the words that a document has, with one added to each count."""
    counts: dict[str, Counter[str]] = {}
    for record in train:
        counts.setdefault(record["label"], Counter()).update(set(record["text"].split()))
    vocabulary = len(set().union(*counts.values()))
    totals = {label: counted.total() + vocabulary for label, counted in counts.items()}
    documents = Counter(record["label"] for record in train)

    def score(label: str, words: set[str]) -> float:
        likelihood = sum(math.log((counts[label][word] + 1) / totals[label]) for word in words)
        return math.log(documents[label]) + likelihood

    found = [max(counts, key=lambda label: score(label, set(record["text"].split()))) for record in test]
    return statistics.mean(label == record["label"] for label, record in zip(found, test, strict=True))


def compare(options: argparse.Namespace, panels: Any) -> None:
    """Print and draw the losses of all kinds and seeds, and the spectra of those whose attention is a matrix."""
    kinds = [kind for kind in options.kinds if not (kind.endswith("-scratch") or Path(kind).is_dir())]
    print(f"{'kind':26}seed  steps{f'at step {options.steps}':>18}{'at the end':>18}{'above the first':>18}")
    first: dict[int, Sums] = {}
    for place, kind in enumerate(kinds):
        for seed in options.seeds:
            steps, sums = pretrain(kind, seed, options)
            if sums:
                first.setdefault(seed, sums[-1])
                cells = [one.per_token for one in sums] + [sums[-1].above(first[seed])]
                print(f"{kind:26}{seed:4}{steps:7}" + "".join(f"{x.value:9.4f} ± {x.error:.4f}" for x in cells))
                error = 2 * sums[-1].nats_error
                panels[0].errorbar(cells[-2].value, -place, xerr=error, fmt="o", color=f"C{seed}")
    panels[0].set_yticks([-place for place in range(len(kinds))], kinds)
    panels[0].set(xlabel="nats a masked token, two standard errors")
    print(f"\nshare of the first {FIRST} singular values, by layer")
    for kind in kinds:
        if kind != "causal" and not kind.endswith(("-max", "-conv")):
            of_layers = shares(kind, options.seeds[0], options)
            print(f"{kind:26}" + "".join(f"{share:7.3f}" for share in of_layers))
            panels[1].plot(range(1, len(of_layers) + 1), of_layers, "o-", label=kind)
    panels[1].set(xlabel="layer", ylabel=f"share of the first {FIRST} singular values")
    panels[1].legend()


def classify(options: argparse.Namespace, panel: Any) -> None:
    """Print and draw the accuracies of all folds."""
    folds = write_folds(options)[: options.only]
    print(f"\n{'kind':26}{'accuracy':>10}{'±':>7}  folds")
    for place, kind in enumerate(("naive Bayes", *options.kinds)):
        numbers = enumerate(folds)
        accuracies = [tune(kind, n, options) if place else naive_bayes(*fold) for n, fold in numbers]
        error = statistics.stdev(accuracies) / math.sqrt(len(folds)) if len(folds) > 1 else math.nan
        print(f"{kind:26}{statistics.mean(accuracies):10.4f}{error:7.4f}{len(accuracies):7}")
        panel.plot(accuracies, [-place] * len(folds), "o", color="C0", alpha=0.5)
        panel.plot(statistics.mean(accuracies), -place, "D", color="C1")
    panel.set_yticks([-place for place in range(len(options.kinds) + 1)], ["naive Bayes", *options.kinds])
    panel.set(xlabel="accuracy of each fold, and their mean")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, help="folder of texts to pretrain on")
    parser.add_argument("--labelled", nargs="+", type=Path, help=".jsonl files with text and label")
    parser.add_argument("--kinds", nargs="+", default=["full", *(f"linformer-{k}" for k in (32, 64, 128, 256))])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--folds", type=int, default=10)
    parser.add_argument("--only", type=int, help="measure only the first N folds")
    parser.add_argument("--pretrain", type=float, default=2, help="minutes of processor time for each kind")
    parser.add_argument("--steps", type=int, default=100, help="steps after which losses are compared too")
    parser.add_argument("--rate", type=float, default=12e-3, help="learning rate of Muon in pretraining")
    parser.add_argument("--tune", type=float, default=5, help="minutes of processor time for each fold")
    parser.add_argument("--tuning-rate", type=float, default=4e-3, help="learning rate of AdamW for labels")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=4096, help="tokens of a step")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--masked", type=float, default=0.25, help="share of masked tokens")
    parser.add_argument("--out", type=Path, default=Path("runs/encoders"), help="folder of runs and picture")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    figure, panels = plt.subplots(1, 3, figsize=(16, 4), layout="constrained")
    compare(options, panels)
    if options.labelled:
        classify(options, panels[2])
    else:
        figure.delaxes(panels[2])
    plt.savefig(options.out / "encoders.png", bbox_inches="tight")


if __name__ == "__main__":
    main()
