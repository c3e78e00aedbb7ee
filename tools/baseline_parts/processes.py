"""Metrics and weights of runs of two processes: DDP, and each stage of DeepSpeed, all started by `lmlong train`."""

import json
from pathlib import Path
from typing import Any

from baseline_parts.digests import Case, of_run
from baseline_parts.training import table
from baseline_parts.variants import linear
from baseline_parts.workspace import RECIPE, Options, Workspace

TWO = {"devices": 2, "training.batch_size": 2, "training.accumulate": 2, "training.steps": 3, "training.segment": 32}

RUNS: dict[str, dict[str, Any]] = {
    "ddp": {"model.dropout": 0.1},
    "ddp state-passing": {"training.segment": None, "training.state_passing": 0.5},
    "zero-1": {"training.deepspeed.stage": 1},
    "zero-2": {"training.deepspeed.stage": 2, "training.optimizer": "adamw"},
    "zero-3": linear("favor") | {"training.deepspeed.stage": 3},
}


def two_processes(name: str, options: Options, workspace: Workspace) -> dict[str, Any]:
    more = deepspeed(workspace.folder) if "training.deepspeed.stage" in options else {}
    words = workspace.words({**TWO, **more, **options})
    workspace.command("train", str(RECIPE), *words, "--out", f"two {name}")
    return of_run(workspace.folder / f"two {name}")


def deepspeed(folder: Path) -> dict[str, Any]:
    """Return the options by which DeepSpeed divides every weight, however small."""
    settings = folder / "deepspeed.json"
    settings.write_text(json.dumps({"zero_optimization": {"stage3_param_persistence_threshold": 0}}))
    return {"training.strategy": "deepspeed", "training.deepspeed.config": str(settings)}


CASES: list[Case] = table("two-processes", RUNS, two_processes)
