"""What is run as a user would run it: the tests that need a GPU, and a short training run with DeepSpeed."""

import json
import math
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

from gpu_report_parts.part import Job

ROOT = Path(__file__).resolve().parents[2]

TRITON = "tests/attention/linear/test_triton.py"

STEPS = 20
RECIPE = """
text: {sources: [{kind: files, paths: [text.txt]}], tokenizer: {kind: bytes}, sequence_length: 64}
model: {width: 64, layers: 2, heads: 2}
training: {steps: %d, batch_size: 2, learning_rate: 3e-3, warmup_steps: 2, log_every: 1, validation_tokens: 500,
  strategy: deepspeed, deepspeed: {stage: 2}}
"""
TEXT = "\n".join(f"{n} times {m} is {n * m}" for n in range(100) for m in range(30))


class FailedError(Exception):
    """A process ended as none should."""


def tests(job: Job) -> None:
    """Run the tests that need a GPU, and those of the Triton kernels, which run on one where there is one."""
    if job.device.type == "cuda":
        # a process that compiles kernels works on one at a time
        suites = {"Tests that need a GPU": ["-m", "gpu", "-n", "0", "tests"],
                  "Tests of the Triton kernels": ["-n", "4", "--dist", "load", TRITON]}  # fmt: skip
    else:
        job.found.left_out.append("tests that need a GPU: there is none")
        suites = {"A few tests of the Triton kernels": ["-n", "0", TRITON, "-k", "rows or float64 or squares"]}
    for name, words in suites.items():
        if summary := job.attempt(name, partial(run_tests, job, words)):
            job.found.lines.append(f"- {name}: {summary}.")
            job.found.figures[name] = summary
            job.found.save()


def run_tests(job: Job, words: list[str]) -> str:
    """Return how many tests passed or were skipped; those that fail are an error."""
    done = run(job, "pytest", "-p", "no:cacheprovider", *words)
    said = done.stdout.strip().splitlines() or [""]
    if done.returncode:
        print(done.stdout)
        failed = [line for line in said if line.startswith(("FAILED", "ERROR"))]
        raise FailedError("; ".join([said[-1].strip("= "), *failed[:10]]))
    return said[-1].strip("= ")


def deepspeed(job: Job) -> None:
    """Train a tiny model by the command line with DeepSpeed's stage 2, on all GPUs there are."""
    devices = torch.cuda.device_count() if job.device.type == "cuda" else 1
    what = (
        f"{STEPS} steps on {devices} {'GPU' if job.device.type == 'cuda' else 'process of a CPU'}{'s'[: devices - 1]}"
    )
    if losses := job.attempt(what, partial(train, job, devices)):
        job.found.lines = [
            f"`lmlong train` with stage 2, {what}: the loss fell from {losses[0]:.3f} to {losses[-1]:.3f}."
        ]
        job.found.figures = {"devices": devices, "losses": losses}


def train(job: Job, devices: int) -> list[float]:
    """Return the loss of each step, which must fall."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "text.txt").write_text(TEXT)
        (Path(folder) / "tiny.yaml").write_text(RECIPE % STEPS)
        done = run(job, "lmlong", "train", "tiny.yaml", f"devices={devices}", "--out", "run", folder=Path(folder))
        if done.returncode:
            print(done.stdout, done.stderr)
            raise FailedError((done.stderr.strip().splitlines() or ["it said nothing"])[-1])
        lines = map(json.loads, (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines())
        losses = [line["loss"] for line in lines if "loss" in line]
    if len(losses) != STEPS or not all(map(math.isfinite, losses)) or losses[-1] >= losses[0]:
        raise FailedError(f"the losses do not fall: {losses}")
    return losses


def run(job: Job, module: str, *words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command, seconds = [sys.executable, "-m", module, *words], job.seconds_left
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise FailedError(f"did not end within {seconds:.0f} s") from None
