"""Documents with labels, for tests: one letter among others tells the label."""

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from lmlong.recipe import Recipe

FILLER = ["a", "b", "c", "d", "e"]


def document(draw: Random, label: str, words: int = 6) -> dict[str, str]:
    """A record whose text has a capital letter in its first half: X for yes, Y for no."""
    text = draw.choices(FILLER, k=words)
    text[draw.randrange(words // 2)] = "X" if label == "yes" else "Y"
    return {"text": " ".join(text), "label": label}


def write_table(path: Path, count: int, seed: int = 0, labels: Sequence[str] = ("no", "yes"), words: int = 6) -> Path:
    """Write a JSONL file of documents with labels in turn."""
    draw = Random(seed)
    records = [document(draw, labels[number % len(labels)], words) for number in range(count)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


KINDS: dict[str, dict[str, Any]] = {
    "encoder": {"encoder": True, "attention": {"kind": "full"}},
    "linear encoder": {"encoder": True, "attention": {"kind": "linear"}},
    "causal": {"attention": {"kind": "linear"}},
    "softmax": {"attention": {"kind": "softmax"}},
    "downsampled": {"layers": 3, "attention": {"kind": "linear"}, "downsample": {"factor": 4}},
    "downsampled encoder": {"layers": 3, "encoder": True, "attention": {"kind": "full"}, "downsample": {"factor": 4}},
}
"""Model sections of every kind of model that learns labels."""


def label_recipe(folder: Path, kind: str = "encoder", **overrides: Any) -> Recipe:
    """Return a recipe for the tables in a folder, which are written if missing."""
    for name, count, seed in (("train", 64, 1), ("held-out", 20, 2)):
        if not (folder / f"{name}.jsonl").exists():
            write_table(folder / f"{name}.jsonl", count, seed)
    values = {
        "objective": "label",
        "text": {
            "sources": [{"paths": [str(folder / "train.jsonl")]}],
            "validation": {"sources": [{"paths": [str(folder / "held-out.jsonl")]}]},
            "tokenizer": {"kind": "bytes"},
            "sequence_length": 16,
        },
        "model": {"width": 32, "layers": 2, "heads": 2, **KINDS[kind]},
        "training": {
            "steps": 60,
            "batch_size": 8,
            "optimizer": "adamw",
            "learning_rate": 1e-2,
            "warmup_steps": 2,
            "precision": "32",
            "log_every": 1,
        },
    }
    return Recipe.load(values, overrides)
