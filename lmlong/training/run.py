"""A training run from its recipe to its last checkpoint."""

import logging
import signal
import sys
import warnings
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import Strategy

from lmlong.checkpoint import manifest, read
from lmlong.data import baselines
from lmlong.data.baselines import Baselines
from lmlong.data.notes import text_notes
from lmlong.errors import LmlongError, UsageError
from lmlong.model.base import count_parameters
from lmlong.model.metrics import LossTotals
from lmlong.recipe import Recipe
from lmlong.recipe import file as recipe_file
from lmlong.training.callbacks import ResampleFeatures, TrainingCallback
from lmlong.training.checkpoint_store import FolderIO
from lmlong.training.clock import TrainingClock
from lmlong.training.distributed import check_launch, is_main_process, launcher, lost_rank
from lmlong.training.first_look import check_free, check_options, default_folder
from lmlong.training.loggers import check_loggers, finish_loggers, log_end, make_loggers
from lmlong.training.metrics_log import read_entries
from lmlong.training.module import TrainingModule
from lmlong.training.optimizer import ENDLESS
from lmlong.training.resume import resume_point, same_run
from lmlong.training.run_folder import (
    METRICS,
    check_kept,
    check_own,
    check_replaceable,
    clear,
    go_on_from,
    locked,
    note,
)
from lmlong.training.setup import LIGHTNING, Setup, set_up
from lmlong.training.signals import StopAtOnce, StopOnSignal
from lmlong.training.state import Owners, read_state


class TrainingResult(NamedTuple):
    """The result of a training run, whose model `lmlong.load(result.run)` loads."""

    run: Path
    """The run folder."""
    step: int
    """Optimizer steps taken."""
    validation: LossTotals | None
    """The loss over the validation text, all of it but where `sampled`; None when training was stopped, or had no step
    to take."""
    baselines: Baselines | None
    """Bits per byte of the same text without a model; None where the objective has none to compare."""
    signal: int | None = None
    """The signal that stopped training."""
    sampled: bool = False
    """Whether `validation` is of an even sample, as training.final_validation_tokens asked, not of the whole text."""
    is_main_process: bool = True
    """Whether this process, of several, is the one that prints."""

    @property
    def losses(self) -> dict[int, float]:
        """The training loss in nats per token, by step: of each `training.log_every` steps."""
        return {entry["step"]: entry["loss"] for entry in read_entries(self.run / METRICS) if "loss" in entry}


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

    `resume` is "auto", to go on from the newest checkpoint of the run, or a checkpoint; `overwrite` replaces a run.
    Progress is printed on stderr. Ctrl-C, or the stop button of a notebook, finishes the step, saves, and raises
    KeyboardInterrupt; the third one raises it at once. The other signals that `lmlong.training.signals` lists save too,
    and raise SystemExit. In a thread other than the main one, none of them stops training.
    """
    if recipe.processes > 1 and launcher() is None:
        raise UsageError(
            f"devices: {recipe.processes} processes are started by the command `lmlong train` or by torchrun, not by "
            "lmlong.train, which trains in this process. Use one of them, or devices: 1."
        )
    result = run(recipe_file.with_absolute_paths(recipe), Path(out or default_folder(recipe)), resume, overwrite)
    if result.signal == signal.SIGINT:
        raise KeyboardInterrupt(f"stopped after step {result.step}, saved in {result.run}; resume='auto' goes on")
    if result.signal is not None:
        raise SystemExit(128 + result.signal)
    return result


def run(recipe: Recipe, folder: Path, resume: str | Path | None = None, overwrite: bool = False) -> TrainingResult:
    """Train for the command `lmlong train`, which owns this process: it is started again for each further device, and
    what a signal means for it is told by the result."""
    check_launch(recipe)
    check_loggers(recipe.training.loggers)
    check_options(resume, overwrite)
    with locked(folder) if is_main_process() else nullcontext():
        if is_main_process():
            check = check_own if resume else check_replaceable if overwrite else check_free
            check(folder)
        return _run(recipe, folder, str(resume) if resume else None, overwrite)


def _run(recipe: Recipe, folder: Path, resume: str | None, overwrite: bool) -> TrainingResult:
    resume_from = resume_point(folder, resume) if resume else None
    if resume and not resume_from and is_main_process():
        print(f"{folder}: no checkpoint yet, so a new run begins", file=sys.stderr)
    source = None if resume_from else recipe.training.init_from
    tokens_before = 0
    if not resume_from:
        check_kept(recipe.training, folder)
    if resume_from:
        old = read.read_recipe(resume_from)
        recipe = same_run(old, recipe)
        tokens_before = read.trained_tokens(resume_from) - manifest.read(resume_from).step * old.tokens_per_step
        setup = set_up(recipe, resume_from)
    elif source:
        setup, tokens_before = read.reading(
            source, lambda start: (set_up(recipe, start, new_attention=True), read.trained_tokens(start))
        )
    else:
        setup = set_up(recipe)
    owners = Owners(setup.tokens.identity, setup.teaching.weights_hash if setup.teaching else "")
    state = read_state(resume_from, setup.model, setup.recipe.training, owners) if resume_from else None
    if is_main_process():
        if overwrite:
            clear(folder)
        if resume_from:
            resume_from = go_on_from(folder, resume_from, recipe.training)
        note(folder, setup)
        _say(setup, resume_from or source)

    signals = StopOnSignal(recipe.processes)
    clock = TrainingClock(recipe.training, setup.steps)
    callback = TrainingCallback(folder, setup.data, clock, signals, tokens_before, owners)
    callbacks: list[Callback] = [signals, callback]
    if every := recipe.model.attention.favor.resample_every:
        callbacks.append(ResampleFeatures(setup.model, recipe.seed, every))
    trainer = _trainer(folder, setup, callbacks, state, _last_step(clock, state))
    token_bytes = torch.from_numpy(setup.tokens.tokenizer.token_bytes)
    teacher = setup.teaching.teacher if setup.teaching else None
    module = TrainingModule(setup.model, setup.recipe, clock, token_bytes, setup.data.training(), teacher)
    try:
        with signals:
            trainer.fit(module, ckpt_path=resume_from, weights_only=True)
    except StopAtOnce as stop:
        if stop.signal_number == signal.SIGINT:
            raise KeyboardInterrupt("stopped at once") from None
        raise SystemExit(128 + stop.signal_number) from None
    except RuntimeError as error:
        if why := lost_rank(trainer, error):
            raise LmlongError(why) from error
        raise
    else:
        step, final = trainer.global_step, callback.final if is_main_process() else None
        tokens, others = setup.tokens, None
        if final and recipe.objective == "causal":
            others = baselines.measure(tokens.train, tokens.weights, tokens.validation, tokens.tokenizer)
        if is_main_process() and step > (state["step"] if state else 0):
            log_end(trainer.loggers, step, callback, others)
        return TrainingResult(folder, step, final, others, signals.agreed, callback.sampled, is_main_process())
    finally:
        finish_loggers(trainer.loggers)


def _last_step(clock: TrainingClock, state: dict[str, Any] | None) -> int:
    """Return the step after which no other is taken: the one to resume from, where the time is used up."""
    if state:
        clock.seconds = state["seconds"]
    return state["step"] if state and clock.is_over else clock.steps


def _say(setup: Setup, start: Path | str | None) -> None:
    """Print what begins to stderr."""
    for line in text_notes(setup.tokens.info):
        print(line, file=sys.stderr)
    print(
        f"{count_parameters(setup.model):,} parameters, {_length(setup)} of {setup.tokens_per_step:,} tokens, "
        f"{setup.recipe.training.precision} on {setup.device.type}" + (f", from {start}" if start else ""),
        file=sys.stderr,
    )


def _length(setup: Setup) -> str:
    """Return how long a run trains, for people."""
    minutes = setup.recipe.training.minutes
    if minutes is None:
        return f"{setup.steps:,} steps"
    return f"{minutes:g} minutes, steps" if setup.steps == ENDLESS else f"{minutes:g} minutes or {setup.steps:,} steps"


def _trainer(
    folder: Path, setup: Setup, callbacks: list[Callback], state: dict[str, Any] | None, last_step: int
) -> Trainer:
    """Return Lightning's Trainer without what is done here: progress bars, checkpoints, samplers, summaries."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric.utilities.distributed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.*")
    training = setup.recipe.training
    plugins: list[Any] = [FolderIO(recipe_file.dump(setup.recipe), setup.tokens.tokenizer.file, state)]
    if launcher() == "srun":
        plugins.append(SLURMEnvironment(auto_requeue=False))  # signals are handled here
    return Trainer(
        accelerator={"cuda": "gpu"}.get(setup.device.type, setup.device.type),
        devices=setup.recipe.devices,
        num_nodes=setup.recipe.nodes,
        strategy=_strategy(setup),
        precision=None if training.strategy == "deepspeed" else LIGHTNING[training.precision],  # type: ignore[arg-type]
        max_steps=last_step,
        max_epochs=-1,
        accumulate_grad_batches=training.accumulate,
        gradient_clip_val=training.clip,
        callbacks=callbacks,
        plugins=plugins,
        logger=make_loggers(setup.recipe, folder, state["step"] if state else 0),
        log_every_n_steps=training.log_every,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _strategy(setup: Setup) -> Strategy | str:
    """Return Lightning's strategy for the processes of a run."""
    training = setup.recipe.training
    if training.strategy == "deepspeed":
        if find_spec("deepspeed") is None:
            raise UsageError("training.strategy: deepspeed is not installed, it is made for Linux. Use ddp or auto.")
        from lmlong.training.deepspeed_strategy import DeepSpeedTraining

        return DeepSpeedTraining(training, setup.device)
    return "ddp" if training.strategy == "ddp" or setup.recipe.processes > 1 else "auto"
