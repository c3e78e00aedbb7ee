#!/usr/bin/env python
"""Pretrain encoders on masked tokens of a folder of texts, then learn labels from them, by kind of attention.

    tools/experiments/encoders.py books/ --labelled reviews.jsonl
    tools/experiments/encoders.py books/ --labelled reviews.jsonl --kinds full full-scratch linformer-128 causal

Each kind is pretrained once (a causal one by its next tokens, one named -scratch not at all), and tuned on each fold of
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
from typing import Any, NamedTuple

import matplotlib.pyplot as plt

import lmlong

RATES = {"pretrain": 3e-3, "tune": 1e-3}
"""Peak learning rates of AdamW."""


class Row(NamedTuple):
    kind: str
    loss: float  # of pretraining, in nats a target; nan from scratch
    accuracies: list[float]  # of the folds

    @property
    def error(self) -> float:
        """The standard error of the mean over folds."""
        return statistics.stdev(self.accuracies) / math.sqrt(len(self.accuracies)) if len(self.accuracies) > 1 else 0.0


def attention_of(kind: str) -> dict[str, Any]:
    """Return the attention of a kind, such as full, linear, linformer-128, linformer-128-mean or linformer-64-none."""
    name, *options = kind.removesuffix("-scratch").split("-")
    if name != "linformer":
        return {"kind": "linear" if name == "causal" else name}
    slots, *rest = options
    named = {"projection" if word in ("linear", "mean", "max", "conv") else "sharing": word for word in rest}
    return {"kind": "linformer", "linformer": {"projected": int(slots), **named}}


def recipe_of(kind: str, objective: str, options: argparse.Namespace, **text: Any) -> dict[str, Any]:
    """Return the sections that all trainings share."""
    model = {"width": options.width, "layers": options.layers, "heads": options.width // 32}
    stage = "tune" if objective == "label" else "pretrain"
    return {
        "objective": objective,
        "seed": options.seed,
        "text": {"tokenizer": {"vocabulary": options.vocabulary}, "sequence_length": options.length, **text},
        "model": {**model, "dropout": options.dropout, "attention": attention_of(kind)},
        "training": {
            "minutes": getattr(options, stage),
            "clock": "process",
            "batch_size": max(options.batch // options.length, 1),
            "optimizer": "adamw",
            "learning_rate": RATES[stage],
            "warmup_steps": 20,
            "early_stopping": False,
            "validate_every": 10**9,  # only after the last step, so that no checkpoint is chosen by the held-out text
        },
    }


def trained(recipe: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train, or resume or reuse the run in a folder; return its last validation."""
    print(folder.name, file=sys.stderr)
    metrics = lmlong.train(lmlong.Recipe.load(recipe), folder, resume="auto").metrics
    return [entry["validation"] for entry in metrics if "validation" in entry][-1]


def pretrain(kind: str, options: argparse.Namespace) -> float:
    """Return the loss of the pretrained model of a kind, in nats a masked or next token."""
    sources = [{"paths": [str(options.texts)]}]
    objective = "causal" if kind == "causal" else "masked"
    recipe = recipe_of(kind, objective, options, sources=sources, masking={"kind": "plain", "share": options.masked})
    return trained(recipe, options.out / f"pretrained-{kind}")["nats_per_token"]


def tune(kind: str, fold: int, options: argparse.Namespace) -> float:
    """Return the accuracy on a fold of a model that learned the labels of the others."""
    files = [{"paths": [str(options.out / f"fold-{fold}-{part}.jsonl")]} for part in ("train", "test")]
    recipe = recipe_of(kind, "label", options, sources=files[:1], validation={"sources": files[1:]})
    recipe["model"]["encoder"] = not kind.startswith("causal")
    if not kind.endswith("-scratch"):
        recipe["training"]["init_from"] = str(options.out / f"pretrained-{kind}")
    return trained(recipe, options.out / f"{kind}-fold-{fold}")["accuracy"]


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


def show(rows: list[Row], folder: Path) -> None:
    """Print the table and draw the accuracies of all folds."""
    print(f"{'kind':24}{'loss':>9}{'accuracy':>10}{'±':>7}  folds")
    for place, row in enumerate(rows):
        loss = "-" if math.isnan(row.loss) else f"{row.loss:.4f}"
        print(f"{row.kind:24}{loss:>9}{statistics.mean(row.accuracies):10.4f}{row.error:7.4f}{len(row.accuracies):7}")
        plt.plot(row.accuracies, [-place] * len(row.accuracies), "o", color="C0", alpha=0.5)
        plt.plot(statistics.mean(row.accuracies), -place, "D", color="C1")
    plt.yticks([-place for place in range(len(rows))], [row.kind for row in rows])
    plt.xlabel("accuracy of each fold, and their mean")
    plt.savefig(folder / "encoders.png", bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, help="folder of texts to pretrain on")
    parser.add_argument("--labelled", nargs="+", type=Path, required=True, help=".jsonl files with text and label")
    parser.add_argument("--kinds", nargs="+", default=["full", "full-scratch", "linformer-128", "linear", "causal"])
    parser.add_argument("--folds", type=int, default=10)
    parser.add_argument("--only", type=int, help="measure only the first N folds")
    parser.add_argument("--pretrain", type=float, default=5, help="minutes of processor time for each kind")
    parser.add_argument("--tune", type=float, default=5, help="minutes of processor time for each fold")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=16384, help="tokens of a step")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--masked", type=float, default=0.25, help="share of masked tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/encoders"), help="folder of runs and picture")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    folds = write_folds(options)[: options.only]
    rows = [Row("naive Bayes", math.nan, [naive_bayes(*fold) for fold in folds])]
    for kind in options.kinds:
        loss = math.nan if kind.endswith("-scratch") else pretrain(kind, options)
        rows.append(Row(kind, loss, [tune(kind, fold, options) for fold in range(len(folds))]))
        show(rows, options.out)
        plt.clf()


if __name__ == "__main__":
    main()
