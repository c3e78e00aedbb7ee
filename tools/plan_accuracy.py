"""What `--dry-run` predicts, held against real runs: the peak of memory and the seconds of a step.

    python tools/plan_accuracy.py

Each recipe is planned, then trained for a few steps by the command line in a process whose peak the system tells.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from lmlong.recipe import file as recipe_file
from lmlong.training.plan import make_plan

RECIPES = {
    "quickstart": [],
    "quickstart, 8 rows of 4k": ["training.batch_size=8", "text.sequence_length=4096"],
    "compare, softmax": ["model.attention.kind=softmax", "text.sequence_length=2048"],
    "book, 64k by segments": ["text.sequence_length=65536", "training.segment=4096"],
    "medium, 2k": ["text.sequence_length=2048", "training.accumulate=1", "text.tokenizer.vocabulary=4096"],
}
STDLIB = "text.sources=[{kind: python-stdlib}]"
STEPS = 4


def main() -> None:
    """Print a table of predictions and measurements."""
    print("| recipe | predicted MB | measured MB | ratio | predicted s | measured s |\n|---|---|---|---|---|---|")
    for name, overrides in RECIPES.items():
        shipped = name.partition(",")[0]
        options = [STDLIB, "text.validation.fraction=0.001", *overrides, "device=cpu"]
        plan = make_plan(recipe_file.load(shipped, options))
        peak, speed = train(shipped, options)
        seconds = plan.tokens_per_step / speed
        memory = [f"{plan.cost.bytes / 1e6:,.0f}", f"{peak / 1e6:,.0f}", f"{plan.cost.bytes / peak:.2f}"]
        print(f"| {' | '.join([name, *memory, f'{plan.cost.seconds:.2f}', f'{seconds:.2f}'])} |", flush=True)


def train(recipe: str, options: list[str]) -> tuple[int, float]:
    """The peak of a real run's memory in bytes, and the median speed of its steps but the first in tokens/s."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        short = [f"training.steps={STEPS}", "training.log_every=1"]
        command = [sys.executable, "-m", "lmlong", "train", recipe, *options, *short, "--out", str(run)]
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        assert status == 0, command
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    speeds = [line["tokens_per_second"] for line in lines if "loss" in line]
    return usage.ru_maxrss * 1024, statistics.median(speeds[1:])


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
