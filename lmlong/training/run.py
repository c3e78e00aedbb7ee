"""A training run from its recipe to its last checkpoint: set-up, Lightning's Trainer, fit, result."""

import logging
import signal
import sys
import warnings
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy, Strategy

from lmlong.attention.device_policy import DevicePolicy
from lmlong.data import baselines
from lmlong.data.baselines import Baselines
from lmlong.errors import UsageError
from lmlong.io.signal_handlers import NOTHING_SAVED, interrupt_says
from lmlong.model.device import keep_freed_memory
from lmlong.model.metrics import LossTotals
from lmlong.recipe import Recipe
from lmlong.recipe import file as recipe_file
from lmlong.report.progress import waiting
from lmlong.training.callbacks import TrainingCallback
from lmlong.training.deepspeed_config import check_deepspeed
from lmlong.training.distributed import (
    LAUNCHER,
    check_launch,
    ending_together,
    is_main_process,
    launcher,
    time_limit,
)
from lmlong.training.loggers import check_loggers, finish_loggers, log_end
from lmlong.training.metrics_log import METRICS_FILE, read_entries
from lmlong.training.module import TrainingModule
from lmlong.training.prepare import prepare_new_run
from lmlong.training.resume import prepare_resumed_run, resume_point
from lmlong.training.run_folder import check_folder, default_folder, locked
from lmlong.training.signals import StopAtOnce, StopOnSignal
from lmlong.training.start import Start, print_start

PRECISIONS = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}
"""The number formats of recipes, by Lightning's names."""


class TrainingResult(NamedTuple):
    """The result of a training run, whose model `lmlong.load(result.run)` loads."""

    run: Path
    """The run folder."""
    step: int
    """Optimizer steps taken."""
    validation: LossTotals | None
    """The loss of the best checkpoint on the whole validation text, or on a sample of it if `sampled`; None if training
    was stopped or had no step to take."""
    baselines: Baselines | None
    """Bits per byte of the same text without a model; None if the objective has no baselines."""
    signal: int | None = None
    """The signal that stopped training."""
    sampled: bool = False
    """Whether `validation` is of an even sample, by training.final_validation_tokens, instead of the whole text."""
    is_main_process: bool = True
    """Whether this process is the one that prints, if there are several."""
    objective: str = "causal"
    """The objective of the recipe."""

    @property
    def losses(self) -> dict[int, float]:
        """The training loss in nats per token by step, every `training.log_every` steps."""
        return {entry["step"]: entry["loss"] for entry in self.metrics if "loss" in entry}

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The entries of the run's metrics.jsonl, one for each logged step and validation."""
        return read_entries(self.run / METRICS_FILE)


def train(
    recipe: Recipe, out: str | Path | None = None, *, resume: str | Path | None = None, overwrite: bool = False
) -> TrainingResult:
    """Train a model by a recipe, into the run folder `out`, by default runs/NAME.

    >>> recipe = lmlong.Recipe.load("mine.yaml", {"training.steps": 30})
    >>> result = lmlong.train(recipe, out="runs/short")
    >>> result.step
    30
    >>> result.validation.bits_per_byte
    >>> model = lmlong.load(result.run)

    `resume` is "auto", to resume from the newest checkpoint of the run, or a checkpoint; `overwrite` replaces a run.
    Progress is printed on stderr. Ctrl-C, or the stop button of a notebook, finishes the step, saves, and raises
    KeyboardInterrupt; the third one raises it at once. SIGTERM, SIGQUIT, SIGHUP, SIGUSR1, SIGUSR2 and SIGXCPU save too,
    and raise SystemExit. In a thread other than the main one, no signal stops training.
    """
    if recipe.processes > 1 and launcher() is None:
        raise UsageError(
            f"devices: {recipe.processes} processes are started by the command `lmlong train` or by torchrun, not by "
            "lmlong.train, which trains in this process. Use one of them, or devices: 1."
        )
    result = run(recipe_file.with_absolute_paths(recipe), Path(out or default_folder(recipe)), resume, overwrite)
    if result.signal == signal.SIGINT:
        raise KeyboardInterrupt(f"stopped after step {result.step}, saved in {result.run}; resume='auto' continues it")
    if result.signal is not None:
        raise SystemExit(128 + result.signal)
    return result


def run(
    recipe: Recipe,
    folder: Path,
    resume: str | Path | None = None,
    overwrite: bool = False,
    policy: DevicePolicy | None = None,
) -> TrainingResult:
    """Train for the command `lmlong train`, which owns this process. The process is started again for each further
    device, and the result reports the signal that stopped it. `policy` is the device's by default."""
    check_launch(recipe)
    check_loggers(recipe.training.loggers)
    check_deepspeed(recipe.training)
    resume = str(resume) if resume else None
    with locked(folder) if is_main_process() else nullcontext():
        if is_main_process():
            check_folder(folder, recipe, resume, overwrite)
        with interrupt_says(NOTHING_SAVED if is_main_process() else ""):
            checkpoint = resume_point(folder, resume) if resume else None
            if resume and not checkpoint and is_main_process():
                print(f"{folder}: no checkpoint yet, so a new run begins", file=sys.stderr)
            prepared = prepare_resumed_run(recipe, checkpoint) if checkpoint else prepare_new_run(recipe)
            module = TrainingModule(prepared, policy)
            signals = StopOnSignal(recipe.processes)
            callback = TrainingCallback(folder, prepared, signals)
            start = Start(callback, checkpoint, overwrite)
            if is_main_process():
                print_start(module)
                if not module.remaining_steps:  # Lightning begins nothing then
                    start.write_folder()
        return _fit(module, callback, signals, start)


def _fit(module: TrainingModule, callback: TrainingCallback, signals: StopOnSignal, start: Start) -> TrainingResult:
    """Take the remaining steps of a run."""
    if module.prepared.device.type == "cpu":
        keep_freed_memory()
    trainer = make_trainer(module, [signals, start, callback])
    try:
        with signals, closing(callback), ending_together(trainer):
            trainer.fit(module)
    except StopAtOnce as stop:
        if stop.signal_number == signal.SIGINT:
            raise KeyboardInterrupt("stopped at once") from None
        raise SystemExit(128 + stop.signal_number) from None
    else:
        return _result(module, callback, signals)
    finally:
        finish_loggers(trainer.loggers)


def _result(module: TrainingModule, callback: TrainingCallback, signals: StopOnSignal) -> TrainingResult:
    """Return the result of a finished run, and log it with the baselines of its text."""
    prepared, tokens, step, is_main = module.prepared, module.prepared.tokens, module.step, is_main_process()
    validation, compared = callback.final if is_main else None, None
    if validation and prepared.recipe.objective == "causal":
        with waiting("compressing the validation text for comparison"):
            compared = baselines.measure(tokens.train, tokens.weights, tokens.validation, tokens.tokenizer)
    if is_main and step > prepared.first_step:
        log_end(module.trainer.loggers, step, callback, compared)
    about = signals.agreed, callback.sampled, is_main, prepared.recipe.objective
    return TrainingResult(callback.folder, step, validation, compared, *about)


def make_trainer(module: TrainingModule, callbacks: list[Callback]) -> Trainer:
    """Return Lightning's Trainer without the features implemented here: progress bars, checkpoints, samplers,
    summaries."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.fabric.utilities.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger(LAUNCHER).setLevel(logging.INFO)
    warnings.filterwarnings("ignore", module="lightning.*")
    prepared, recipe, training = module.prepared, module.recipe, module.recipe.training
    # signals are handled here
    plugins: list[Any] = [SLURMEnvironment(auto_requeue=False)] if launcher() == "srun" else []
    strategy: Strategy | str = "auto"
    if training.strategy == "ddp" or recipe.processes > 1:
        strategy = DDPStrategy(broadcast_buffers=False, **time_limit())  # buffers are the same in all ranks
    precision: Any = PRECISIONS[training.precision]
    if training.strategy == "deepspeed":
        from lmlong.training.deepspeed_strategy import DeepSpeedTraining

        strategy, precision = DeepSpeedTraining(training, prepared.device), None
    return Trainer(
        accelerator={"cuda": "gpu"}.get(prepared.device.type, prepared.device.type),
        devices=recipe.devices,
        num_nodes=recipe.nodes,
        strategy=strategy,
        precision=precision,
        max_steps=module.remaining_steps,
        max_epochs=-1,
        accumulate_grad_batches=training.accumulate,
        gradient_clip_val=training.clip,
        callbacks=callbacks,
        plugins=plugins,
        logger=False,  # `Start` makes them
        log_every_n_steps=training.log_every,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
