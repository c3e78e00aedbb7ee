#!/usr/bin/env python
"""Kill training runs at random moments, resume each, and compare the result with an uninterrupted run.

    tools/soak_kill.py [--only plain,ddp] [--kills 10] [--seed 0]

Each case trains twice: uninterrupted, and killed repeatedly. Metrics, checkpoints, weights and training states must
be equal to the last bit, without leftover files. If anything differs, the tool exits 1 and keeps the runs.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lmlong.checkpoint import manifest, read
from lmlong.checkpoint.location import BEST, LATEST
from lmlong.errors import LmlongError
from lmlong.io.files import sha256

WORDS = ["the", "a", "cat", "dog", "bird", "sat", "ran", "flew", "on", "under", "over", "mat", "tree", "and", "then"]
SAVE, KEEP, VALIDATE = 3, 2, 4  # steps between checkpoints, how many of the newest are kept, steps between validations
RECIPE = f"""
device: cpu
text: {{sources: [{{kind: files, paths: [TEXT]}}], tokenizer: {{kind: bytes}}, sequence_length: 64}}
model: {{width: 32, layers: 2, heads: 2}}
training: {{steps: STEPS, batch_size: 2, learning_rate: 3e-2, schedule: constant, warmup_steps: 2, precision: "32",
  validate_every: {VALIDATE}, checkpoint_every: {SAVE}, keep_last: {KEEP}, keep_every: 30, log_every: 1,
  validation_tokens: 500, deepspeed: {{config: SETTINGS}}}}
"""
SETTINGS = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
"""DeepSpeed shards every weight, however small."""

PER_KILL, LAST_STEPS = 10, 10
"""Steps between two kills, and after the last kill: enough for more than KEEP saves."""

AIMS = {"start-up": (0.2, 0.0), "step": (0.35, 1.5), "save": (0.2, 0.7), "removal": (0.25, 0.2)}
"""Targets of kills: their share, and how many steps later a kill may come. Saves and removals of checkpoints are short,
but are where a kill could do harm."""

LONGEST = 900.0
"""Seconds after which a process counts as hung."""


class Case(NamedTuple):
    """A training run: overrides of RECIPE, the number of processes and the text."""

    overrides: tuple[str, ...] = ()
    processes: int = 1
    text: str = "book.txt"


CASES = {
    "plain": Case(),
    "adamw": Case(("training.optimizer=adamw",)),
    "hourglass": Case(("model.downsample={factor: 4, layers: 1}",)),
    "masked": Case(("objective=masked",)),
    "carried": Case(("training.carry_state=true",)),
    "segments": Case(("training.segment=16", "text.rows=documents"), text="notes.jsonl"),
    "favor": Case(("model.attention.feature_map=favor", "model.attention.favor.resample_every=4")),
    "dropout": Case(("model.dropout=0.1", "training.accumulate=2")),
    "ddp": Case(processes=2),
    "deepspeed-1": Case(("training.strategy=deepspeed", "training.deepspeed.stage=1"), processes=2),
    "deepspeed-2": Case(("training.strategy=deepspeed", "training.deepspeed.stage=2"), processes=2),
    "deepspeed-3": Case(("training.strategy=deepspeed", "training.deepspeed.stage=3"), processes=2),
}


class Failed(Exception):
    """A run ended with an unexpected status, or did not end."""


class Pace(NamedTuple):
    """Seconds that the uninterrupted run took."""

    start: float  # up to its first step
    step: float  # for each step, with its share of saves and validations


class Run:
    """A run folder and its training command."""

    def __init__(self, recipe: Path, folder: Path, case: Case):
        self.folder, self.checkpoints, self.metrics_log = folder, folder / "checkpoints", folder / "metrics.jsonl"
        options = [*case.overrides, f"devices={case.processes}", "--out", str(folder), "--resume", "auto"]
        self.command = [sys.executable, "-m", "lmlong", "train", str(recipe), *options]
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "LMLONG_CACHE": str(recipe.with_name("cache"))}

    @contextmanager
    def training(self) -> Iterator[subprocess.Popen]:
        """Start a training process in its own group, which ends with the block."""
        pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        child = subprocess.Popen(self.command, env=self.environment, start_new_session=True, **pipes)
        try:
            yield child
        finally:
            end_group(child)
            child.wait()

    def lines(self) -> list[bytes]:
        """Return the complete lines of the metrics."""
        content = self.metrics_log.read_bytes() if self.metrics_log.exists() else b""
        return content[: content.rfind(b"\n") + 1].splitlines()

    def last(self) -> dict[str, Any]:
        """Return the last complete line of the metrics."""
        return json.loads((self.lines() or [b'{"step": 0}'])[-1])

    def saved(self) -> list[int]:
        """Return the steps of its checkpoints."""
        return sorted(int(path.name.removeprefix("step-")) for path in self.checkpoints.glob("step-*"))

    def mark(self) -> tuple[int, int]:
        """Return the inode of the metrics log, which a resumed run replaces, and the step to resume from."""
        return self.metrics_log.stat().st_ino if self.metrics_log.exists() else 0, max(self.saved(), default=0)


def end_group(child: subprocess.Popen) -> None:
    """Kill a process and its children."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def wait(child: subprocess.Popen, until: Callable[[], bool], seconds: float) -> bool:
    """Return whether a condition became true while a process ran, within some seconds."""
    end = time.monotonic() + seconds
    while child.poll() is None and time.monotonic() < end:
        if until():
            return True
        time.sleep(0.002)
    return False


def finish(run: Run) -> Pace:
    """Train to the end."""
    begun, before = time.monotonic(), run.last()["step"]
    with run.training() as child:
        wait(child, lambda: run.last()["step"] > before, LONGEST)
        first = time.monotonic()
        errors = child.communicate(timeout=LONGEST)[1]
        if child.returncode != 0:
            raise Failed(f"exit status {child.returncode}: {errors[-2000:]}")
    return Pace(first - begun, (time.monotonic() - first) / max(1, run.last()["step"] - before))


def kill(run: Run, several: bool, pace: Pace, draw: random.Random) -> str:
    """Resume a run and kill it; return what it was doing."""
    (aim,) = draw.choices([*AIMS], [share for share, _ in AIMS.values()])
    goal, before = run.last()["step"] + draw.randint(1, 5), run.mark()
    goal += -goal % SAVE if aim in ("save", "removal") else 0
    seconds = draw.uniform(0, pace.start) if aim == "start-up" else LONGEST
    with run.training() as child:
        if wait(child, lambda: (run.mark()[1] if aim == "removal" else run.last()["step"]) >= goal, seconds):
            time.sleep(draw.uniform(0, AIMS[aim][1] * pace.step))
        elif child.poll() is None and aim != "start-up":
            raise Failed(f"no step {goal} after {LONGEST:.0f} seconds")
        if child.poll() is None:
            to_all = several and draw.random() < 0.5
            (os.killpg if to_all else os.kill)(child.pid, signal.SIGKILL)
            child.wait(LONGEST)
        if several:
            time.sleep(draw.uniform(0, 0.5))  # the other processes react to the loss of the first
        end_group(child)
        errors = child.communicate()[1]
        if child.returncode != -signal.SIGKILL:
            raise Failed(f"exit status {child.returncode}, not that of a kill: {errors[-2000:]}")
    return moment(run, *before)


def moment(run: Run, inode: int, start: int) -> str:
    """Return what a run was doing when it was killed, by the files it left. `inode` and `start`: its `mark` before."""
    (now, newest), last = run.mark(), run.last()
    if now == inode or last["step"] <= start:
        return "at start-up"
    hidden = [path.name for path in run.checkpoints.glob(".*")]
    for what, ending in (("pruning", ".removed"), ("saving", ".partial")):
        if any(name.endswith(ending) for name in hidden):
            return what
    if not run.metrics_log.read_bytes().endswith(b"\n"):
        return "writing the metrics log"
    if newest != last["step"]:
        return "after a validation" if "validation" in last else "in a step"
    return "after saving"


def outcome(run: Run) -> Iterator[tuple[str, Any]]:
    """Yield everything that must be equal, by name."""
    for line in map(json.loads, run.lines()):
        kind = next((kind for kind in ("loss", "validation", "event") if kind in line), "line")
        yield f"{kind} of step {line['step']}", {key: line[key] for key in line if key != "tokens_per_second"}
    for which in (LATEST, BEST):
        yield which, read.find(run.folder, which).name
    yield "checkpoints", run.saved()
    for folder in (run.checkpoints / f"step-{step:08d}" for step in run.saved()):
        manifest.verify(folder)
        yield f"{folder.name}, validation", manifest.read(folder).validation
        yield f"{folder.name}, weights", sha256(folder / manifest.WEIGHTS)
        state = read.read_training(folder)
        del state["seconds"]  # trained so far, by the clock
        yield from flat(folder.name, state)


def flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested values with their paths; a tensor as its type, shape and the sha256 of its bytes."""
    if isinstance(value, dict | list):
        yield f"{name}, length", len(value)
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(f"{name}, {key}", part)
    elif isinstance(value, torch.Tensor):
        content = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        yield name, (str(value.dtype), tuple(value.shape), hashlib.sha256(content).hexdigest())
    else:
        yield name, value


def first_difference(whole: Run, cut: Run) -> str | None:
    """Return what differs from the uninterrupted run, or which files are left over."""
    for expected, actual in zip_longest(outcome(whole), outcome(cut), fillvalue=("the end", None)):
        if expected != actual:
            return f"{actual[0]}: {actual[1]}, uninterrupted {expected[0]}: {expected[1]}"
    left = [path for path in cut.folder.rglob("*") if path.name.startswith((".", "abandoned-"))]
    left += cut.folder.glob("*.partial")
    return f"left over: {', '.join(path.name for path in left)}" if left else None


def soak(name: str, kills: int, seed: int, folder: Path) -> tuple[Counter[str], str | None]:
    """Run one case: an uninterrupted run, and one that is killed `kills` times. Return the kills by what the run was
    doing, and the first difference."""
    case, draw, recipe = CASES[name], random.Random(f"{seed} {name}"), folder / f"{name}.yaml"
    text, steps = RECIPE, PER_KILL * kills + LAST_STEPS
    for word, value in {"TEXT": folder / case.text, "SETTINGS": folder / "settings.json", "STEPS": steps}.items():
        text = text.replace(word, str(value))
    recipe.write_text(text)
    whole, cut = (Run(recipe, folder / name / which, case) for which in ("whole", "cut"))
    moments = Counter[str]()
    try:
        pace = finish(whole)
        for _ in range(kills):
            moments[kill(cut, case.processes > 1, pace, draw)] += 1
        finish(cut)
        return moments, first_difference(whole, cut)
    except (Failed, LmlongError, OSError, subprocess.TimeoutExpired) as error:
        return moments, f"{type(error).__name__}: {error}"


def write_texts(folder: Path, draw: random.Random) -> None:
    """Write the texts of the cases and DeepSpeed's settings."""
    sentences = [" ".join(draw.choices(WORDS, k=9)) for _ in range(400)]
    (folder / "book.txt").write_text("\n".join(sentences))
    notes = [" ".join(draw.choices(sentences, k=draw.choice([1, 1, 2, 9]))) for _ in range(120)]
    (folder / "notes.jsonl").write_text("".join(json.dumps({"text": note}) + "\n" for note in notes))
    (folder / "settings.json").write_text(json.dumps(SETTINGS))


def main() -> int:
    """Run the chosen cases, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), metavar="CASE,...", help=f"of {', '.join(CASES)}")
    parser.add_argument("--kills", type=int, default=10, help="of each case")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    names = options.only.split(",")
    if strange := [name for name in names if name not in CASES]:
        parser.error(f"--only: no case {strange[0]}. Choose from {', '.join(CASES)}")
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    write_texts(folder, random.Random(options.seed))
    differs = False
    for name in names:
        moments, difference = soak(name, options.kills, options.seed, folder)
        listed = ", ".join(f"{count} {what}" for what, count in moments.most_common())
        print(f"{name}: {difference or 'equal'}; kills {listed}", flush=True)
        differs |= difference is not None
    if differs:
        print(f"the runs are kept in {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
