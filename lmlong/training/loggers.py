"""Where the metrics of a run go besides metrics.jsonl: Lightning's own loggers, imported only when asked for."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from lmlong.errors import UsageError
from lmlong.recipe import Recipe

EXTRAS = ("tensorboard", "wandb")
"""Those that need an extra of their name, which is that of a package too."""

PROJECT = "lmlong"


def _csv(folder: Path, step: int) -> Logger:
    """Return a logger of CSV; it would replace the file of the run that is gone on with."""
    return CSVLogger(str(folder), name="csv", version=f"from-{step:08d}", flush_logs_every_n_steps=1)


LOGGERS: dict[str, Callable[[Path, int], Logger]] = {
    "tensorboard": lambda folder, step: TensorBoardLogger(str(folder), name="", version="tensorboard"),
    "csv": _csv,
    "wandb": lambda folder, step: WandbLogger(
        name=folder.name, save_dir=str(folder), project=PROJECT, group=folder.name, log_model=False
    ),
}
"""(run folder, step to begin after) -> the logger."""


def check_loggers(names: Sequence[str]) -> None:
    """Refuse a logger whose package is missing."""
    for name in names:
        if name in EXTRAS and find_spec(name) is None:
            raise UsageError(
                f"training.loggers: {name} is not installed. Run pip install 'lmlong[{name}]', or leave it out."
            )


def make_loggers(recipe: Recipe, folder: Path, step: int) -> list[Logger]:
    """Return the loggers of a run that begins after a step, told the options of its recipe."""
    made = [LOGGERS[name](folder, step) for name in dict.fromkeys(recipe.training.loggers)]
    for logger in made:
        logger.log_hyperparams(_flat(recipe.model_dump()))
    return made


def finish_loggers(loggers: Sequence[Logger]) -> None:
    """Let loggers write what they hold; a run of wandb would else go on until the process ends."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.finish()


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return options by their dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
