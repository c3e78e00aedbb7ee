"""Who started the processes of a run: lmlong itself on one machine, torchrun or SLURM on several."""

import os

from lmlong.errors import UsageError
from lmlong.recipe import Recipe

BY_HAND = ("bash", "interactive")
"""Names of SLURM jobs in which a person starts commands without srun."""


def is_first() -> bool:
    """Whether this process is the one that writes and speaks, as its launcher has told it before training begins."""
    rank = {"torchrun": "RANK", "srun": "SLURM_PROCID", None: "LOCAL_RANK"}[launcher()]
    return int(os.environ.get(rank, "0")) == 0


def launcher() -> str | None:
    """What started this process among others; None when lmlong is to start them itself."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    return "srun" if "SLURM_NTASKS" in os.environ and os.environ.get("SLURM_JOB_NAME") not in BY_HAND else None


def check_launch(recipe: Recipe) -> None:
    """Refuse a recipe for another number of processes than were started."""
    by, wanted = launcher(), f"the recipe has nodes: {recipe.nodes} with devices: {recipe.devices}"
    if by is None and recipe.nodes > 1:
        raise UsageError(
            f"nodes: {recipe.nodes} machines do not start each other. On each of them run torchrun --nnodes "
            f"{recipe.nodes} --nproc-per-node {recipe.devices} --rdzv-endpoint FIRST:29500 --no-python lmlong train "
            f"..., or let SLURM: srun --nodes {recipe.nodes} --ntasks-per-node {recipe.devices} lmlong train ..."
        )
    started = {"torchrun": "WORLD_SIZE", "srun": "SLURM_NTASKS"}.get(by or "")
    if started and int(os.environ[started]) != recipe.processes:
        raise UsageError(f"devices: {by} started {os.environ[started]} processes, {wanted}. Let them agree.")
    if by == "srun" and os.environ.get("SLURM_NTASKS_PER_NODE", str(recipe.devices)) != str(recipe.devices):
        per_node = os.environ["SLURM_NTASKS_PER_NODE"]
        raise UsageError(f"devices: srun started {per_node} processes on each machine, {wanted}. Let them agree.")
    if by == "srun":
        os.environ.setdefault("SLURM_NTASKS_PER_NODE", str(recipe.devices))  # which Lightning insists on
