#!/usr/bin/env python
"""Kill a training run at random moments, go on with it each time, and see whether it ends as one that was left alone.

    tools/soak_kill.py --kills 200 [--processes 1] [--signal KILL] [--seed 0]

Prints how often each kind of moment was hit, and exits 1 if a loss or a weight differs in a single bit.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

WORDS = ["the", "a", "cat", "dog", "bird", "sat", "ran", "flew", "on", "under", "over", "mat", "tree", "and", "then"]

RECIPE = """
text: {{sources: [{{kind: files, paths: [{book}]}}], tokenizer: {{kind: bytes}}, sequence_length: 64}}
model: {{width: 32, layers: 2, heads: 2, dropout: 0.1}}
training: {{steps: {steps}, batch_size: 2, accumulate: 2, learning_rate: 1e-2, precision: "{precision}",
  validate_every: 7, checkpoint_every: 5, log_every: 1, validation_tokens: 2000}}
"""


def start(recipe: Path, run: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "lmlong", "train", str(recipe), "--out", str(run), "--resume", "auto"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def lines(run: Path) -> list[dict]:
    path = run / "metrics.jsonl"
    return (
        [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")] if path.exists() else []
    )


def outcome(run: Path) -> tuple[list, str]:
    losses = [(line["step"], line["loss"]) for line in lines(run) if "loss" in line]
    weights = (run / "checkpoints" / "latest" / "model.safetensors").read_bytes()
    return losses, hashlib.sha256(weights).hexdigest()


def moment(run: Path) -> str:
    """What the child was doing when it ended, by what it left behind."""
    hidden = [path.name for path in (run / "checkpoints").glob(".*")]
    if any(name.endswith(".removed") for name in hidden):
        return "while it removed a checkpoint"
    if hidden:
        return "while it saved"
    last = lines(run)[-1] if lines(run) else {}
    return "after a validation" if "validation" in last else "in a step"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--signal", default="KILL", choices=["KILL", "TERM", "INT"])
    parser.add_argument("--precision", default="32", choices=["32", "bf16"])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw, number = random.Random(options.seed), getattr(signal, f"SIG{options.signal}")

    with tempfile.TemporaryDirectory() as folder:
        os.environ["LMLONG_CACHE"] = f"{folder}/cache"
        book, recipe = Path(folder, "book.txt"), Path(folder, "soak.yaml")
        book.write_text("\n".join(" ".join(draw.choices(WORDS, k=9)) for _ in range(400)))
        # a run advances by about a dozen steps between two kills
        recipe.write_text(RECIPE.format(book=book, steps=40 + 12 * options.kills, precision=options.precision))
        whole, cut = Path(folder, "whole"), Path(folder, "cut")
        assert start(recipe, whole).wait() == 0
        seen, killed = Counter[str](), 0
        while killed < options.kills:
            child, before = start(recipe, cut), len(lines(cut))
            while child.poll() is None and len(lines(cut)) in (0, before):
                time.sleep(0.002)
            time.sleep(draw.random() * 0.3)
            child.send_signal(number)
            errors = child.communicate()[1]
            if child.returncode == 0:
                break
            assert child.returncode in (-9, 128 + number, -number), errors
            killed += 1
            seen[moment(cut)] += 1
            print(f"\r{killed} kills, step {lines(cut)[-1]['step']}", end="", file=sys.stderr, flush=True)
        last = start(recipe, cut)
        errors = last.communicate()[1]
        assert last.returncode == 0, errors
        print(file=sys.stderr)
        same = outcome(whole) == outcome(cut)
        print(f"{killed} kills by SIG{options.signal}: " + ", ".join(f"{n} {what}" for what, n in seen.most_common()))
        print("the same to the last bit" if same else "DIFFERENT")
        return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
