"""The processes of a run, started by lmlong itself on one machine, or by torchrun or SLURM on several."""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lmlong.data.token_encoding import cores
from lmlong.errors import LmlongError, UsageError
from lmlong.model.device import pick_device
from lmlong.model.metrics import LossTotals
from lmlong.recipe import Recipe

BY_HAND = ("bash", "interactive")
"""Names of SLURM jobs in which a person starts commands without srun."""

LIMIT = "LMLONG_COLLECTIVE_SECONDS"
"""The environment variable that sets how long a process waits for the others, by default 30 minutes."""

LAUNCHER = "lightning.fabric.strategies.launchers.subprocess_script"
"""The logger that names a process that has ended, before the launcher ends the others."""

LOST = (
    *("Connection closed by peer", "Connection reset by peer", "remote process exited"),
    *("Timed out waiting", "timed out", "Application timeout"),
)
"""Parts of the errors that gloo and NCCL raise when another process has ended or does not respond."""

PROCESSES_PER_CORE = 2
"""Maximum number of processes on a CPU: a run for more cores can be tried on fewer, but hardly trained."""


def is_main_process() -> bool:
    """Return whether this process writes and prints. Uses the launcher's variables, so it works before training
    begins."""
    rank = {"torchrun": "RANK", "srun": "SLURM_PROCID", None: "LOCAL_RANK"}[launcher()]
    return int(os.environ.get(rank, "0")) == 0


def print_once(line: str) -> None:
    """Print a line on standard error, once for all processes of a run."""
    if is_main_process():
        print(line, file=sys.stderr)


def launcher() -> str | None:
    """Return the launcher that started the processes of the run; None if lmlong starts them itself."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    return "srun" if "SLURM_NTASKS" in os.environ and os.environ.get("SLURM_JOB_NAME") not in BY_HAND else None


def time_limit() -> dict[str, Any]:
    """Return the strategy's argument `timeout`, how long a process waits for the others, if LMLONG_COLLECTIVE_SECONDS
    sets it."""
    text = os.environ.get(LIMIT)
    if text is None:
        return {}
    try:
        return {"timeout": timedelta(seconds=float(text))}
    except (ValueError, OverflowError):
        raise UsageError(f"{LIMIT} is {text!r}, not a number of seconds. Give one, as 120.") from None


@contextmanager
def ending_together(trainer: Trainer) -> Iterator[None]:
    """A block in which the error of a lost process is reported in one line, and the processes that this one has started
    end with it."""
    try:
        yield
    except RuntimeError as error:
        if trainer.world_size == 1 or not any(words in str(error) for words in LOST):
            raise
        if trainer.strategy.launcher:
            trainer.strategy.launcher.kill(signal.SIGKILL)
        raise LmlongError(
            f"rank {trainer.global_rank} of {trainer.world_size}: another process of the run has ended or does not "
            "respond, see its messages. Resume from the last checkpoint with --resume auto."
        ) from error


def check_launch(recipe: Recipe) -> None:
    """Refuse a recipe whose number of processes differs from the number started."""
    by, expected = launcher(), f"the recipe has nodes: {recipe.nodes} with devices: {recipe.devices}"
    if by is None and recipe.nodes > 1:
        raise UsageError(
            f"nodes: {recipe.nodes} machines do not start each other. On each of them run torchrun --nnodes "
            f"{recipe.nodes} --nproc-per-node {recipe.devices} --rdzv-endpoint FIRST:29500 --no-python lmlong train "
            f"..., or let SLURM: srun --nodes {recipe.nodes} --ntasks-per-node {recipe.devices} lmlong train ..."
        )
    if by is None:
        _check_devices(recipe)
    started = {"torchrun": "WORLD_SIZE", "srun": "SLURM_NTASKS"}.get(by or "")
    if started and int(os.environ[started]) != recipe.processes:
        raise UsageError(f"devices: {by} started {os.environ[started]} processes, but {expected}. Make them agree.")
    if by == "srun" and os.environ.get("SLURM_NTASKS_PER_NODE", str(recipe.devices)) != str(recipe.devices):
        per_node = os.environ["SLURM_NTASKS_PER_NODE"]
        raise UsageError(
            f"devices: srun started {per_node} processes on each machine, but {expected}. Make them agree."
        )
    if by == "srun" and recipe.training.sequence_parallel > 1:
        node, local, rank = (int(os.environ.get(f"SLURM_{name}", 0)) for name in ("NODEID", "LOCALID", "PROCID"))
        if rank != node * recipe.devices + local:
            raise UsageError(
                f"training.sequence_parallel: srun made rank {rank} process {local} of machine {node}, so neighbouring "
                "ranks, which read a row together, are on different machines. Give srun --distribution=block."
            )
    if by == "srun":
        os.environ.setdefault("SLURM_NTASKS_PER_NODE", str(recipe.devices))  # Lightning requires it


def _check_devices(recipe: Recipe) -> None:
    """Refuse more processes than this machine has GPUs, or many more than it has cores."""
    on_gpu, count = pick_device(recipe.device).type == "cuda", cores()
    most, has = (torch.cuda.device_count(), "GPUs") if on_gpu else (PROCESSES_PER_CORE * count, "cores")
    if recipe.devices > most:
        raise UsageError(
            f"devices: {recipe.devices} processes, but this machine has {most if on_gpu else count} {has}. Use at most "
            f"{most}."
        )


def all_reduce_sum(trainer: Trainer, totals: Sequence[LossTotals]) -> list[LossTotals]:
    """Return each of the totals, summed over all ranks; all ranks call this."""
    if trainer.world_size == 1:
        return list(totals)
    numbers = torch.tensor([astuple(part) for part in totals], dtype=torch.float64)
    sums = trainer.strategy.reduce(numbers.to(trainer.strategy.root_device), reduce_op="sum").tolist()
    return [LossTotals(nats, *map(round, counts)) for nats, *counts in sums]


def all_reduce_max(trainer: Trainer, number: int) -> int:
    """Return the largest of the ranks' numbers; all ranks call this."""
    if trainer.world_size == 1:
        return number
    held = torch.tensor(number, device=trainer.strategy.root_device)
    return int(trainer.strategy.reduce(held, reduce_op="max"))


def all_gather(trainer: Trainer, tensor: Tensor) -> Tensor:
    """Return the tensors of all ranks, stacked, or this process's tensor if it is the only one; all ranks call this."""
    if trainer.world_size == 1:
        return tensor
    every = trainer.strategy.all_gather(tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor)
    return every.to(tensor.dtype)
