"""Lightning loggers for the metrics of a run, in addition to metrics.jsonl.

They also receive the recipe when a run begins or resumes, and the final figures at its end.
"""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from textwrap import indent

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from lmlong.checkpoint.manifest import RECIPE
from lmlong.data.baselines import Baselines
from lmlong.errors import UsageError, install_command
from lmlong.recipe.file import flat
from lmlong.training.callbacks import TrainingCallback
from lmlong.training.distributed import is_main_process

EXTRAS = ("tensorboard", "wandb")
"""Loggers that need an extra; the extra and the package have the same name."""

PROJECT = "lmlong"


def _csv(folder: Path, step: int) -> Logger:
    """Return a CSV logger with a separate file for each resume; it would overwrite an existing file."""
    return CSVLogger(str(folder), name="csv", version=f"from-{step:08d}", flush_logs_every_n_steps=1)


class _OneFileOfEvents(TensorBoardLogger):
    """A TensorBoard logger that stays open after Lightning's fit, for the final figures.

    If it were closed and reopened, the final figures would go to a second file. TensorBoard reads files in the order of
    their names, which contain whole seconds and an unpadded number, so of two files from one second it may read the
    second first, and then forget it at the start of the other.
    """

    def finalize(self, status: str) -> None:
        if status == "success":  # passed at the end of fit; `finish_loggers` passes another status
            self.experiment.flush()
        else:
            super().finalize(status)


def _tensorboard(folder: Path, step: int) -> Logger:
    """Return a TensorBoard logger that drops what was logged for later steps, which are repeated."""
    return _OneFileOfEvents(str(folder), name="", version="tensorboard", default_hp_metric=False, purge_step=step + 1)


LOGGERS: dict[str, Callable[[Path, int], Logger]] = {
    "tensorboard": _tensorboard,
    "csv": _csv,
    "wandb": lambda folder, step: WandbLogger(
        name=folder.name, save_dir=str(folder), project=PROJECT, group=folder.name, log_model=False
    ),
}
"""Functions of the run folder and the step to begin after that return a logger."""


def check_loggers(names: Sequence[str]) -> None:
    """Refuse a logger whose package is missing."""
    for name in names:
        if name in EXTRAS and find_spec(name) is None:
            raise UsageError(f"training.loggers: {name} is not installed. Run {install_command(name)}, or omit it.")


def make_loggers(callback: TrainingCallback) -> list[Logger]:
    """Return the loggers of a run, with its recipe: by option, and as the text of its file."""
    recipe, step = callback.prepared.recipe, callback.prepared.first_step
    made = [LOGGERS[name](callback.folder, step) for name in dict.fromkeys(recipe.training.loggers)]
    for logger in made:
        logger.log_hyperparams(flat(recipe.model_dump()))
        if is_main_process():
            _log_recipe(logger, callback.recipe_text, step + 1)
    return made


def log_end(loggers: Sequence[Logger], step: int, callback: TrainingCallback, baselines: Baselines | None) -> None:
    """Log the final figures of a run, unless it was stopped."""
    final, metric = callback.final, callback.metric
    if final is None:
        return
    levels = baselines.bits_per_byte if baselines else {}
    figures = {metric.name: metric.of(final), "tokens": final.tokens, "bytes": final.bytes, **levels}
    named = {f"final/{name}": number for name, number in figures.items()}
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):  # shown beside the options in the table of runs
            logger.log_hyperparams(flat(callback.prepared.recipe.model_dump()), named, step)
        else:
            logger.log_metrics(named, step)


def finish_loggers(loggers: Sequence[Logger]) -> None:
    """Flush and close loggers; otherwise a wandb run stays open until the process ends."""
    for logger in loggers:
        logger.finalize("finished")
        if isinstance(logger, WandbLogger):
            logger.experiment.finish()


def _log_recipe(logger: Logger, text: str, step: int) -> None:
    """Log the recipe that a run uses from a step on."""
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.add_text("recipe", indent(text, "    "), step)  # Markdown keeps lines of code as they are
    elif isinstance(logger, WandbLogger):
        # a copy, since the recipe in the run folder may have changed when the run is uploaded
        folder = Path(logger.experiment.dir)
        (folder / RECIPE).write_text(text, encoding="utf-8")
        logger.experiment.save(folder / RECIPE, base_path=folder, policy="now", glob=False)
