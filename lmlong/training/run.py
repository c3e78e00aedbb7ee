"""A training run from its recipe to its last checkpoint."""

import json
import logging
import platform
import shutil
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from lmlong import recipe_file
from lmlong.checkpoint import read
from lmlong.errors import CheckpointError, UsageError
from lmlong.model.device import pick_device
from lmlong.model.language_model import LanguageModel, parameters
from lmlong.model.scoring import Totals
from lmlong.recipe import Recipe
from lmlong.text import tokenizer as tokenizers
from lmlong.text.batches import TrainingBatches
from lmlong.text.gzip_baseline import gzip_bits_per_byte
from lmlong.text.tokens import Tokens, prepare
from lmlong.training.checkpoints import FolderIO, newest
from lmlong.training.course import Course
from lmlong.training.loader import Loader
from lmlong.training.module import Learner
from lmlong.training.optimizer import count_steps
from lmlong.training.precision import LIGHTNING, resolve
from lmlong.training.signals import StopOnSignal


class Setup(NamedTuple):
    """What a recipe becomes before the first step."""

    recipe: Recipe  # with what was left to the machine filled in
    tokens: Tokens
    model: LanguageModel
    steps: int
    device: torch.device


class Outcome(NamedTuple):
    """How a run ended."""

    folder: Path
    step: int
    validation: Totals | None  # over the whole validation text; None when the run was stopped before its end
    gzip: float | None  # bits per byte of gzip -9 on the same text
    signal: int | None  # what stopped it


def set_up(recipe: Recipe, weights: Path | None = None) -> Setup:
    """Text, tokens and a model for a recipe; the tokenizer and weights of a checkpoint where one is given."""
    device = pick_device(recipe.device)
    tokenizer = tokenizers.load(read.tokenizer_path(weights)) if weights else None
    tokens = prepare(recipe.text, tokenizer)
    precision = resolve(recipe.training.precision, device)
    training = recipe.training.model_copy(update={"precision": precision})
    recipe = recipe.model_copy(update={"training": training, "device": device.type})

    torch.manual_seed(recipe.seed)
    model = LanguageModel(recipe.model, tokens.tokenizer.vocabulary, training.activation_checkpointing)
    if weights:
        read.load_weights(model, weights)
    if training.compile:
        model.read = torch.compile(model.read)  # type: ignore[method-assign]
    steps = count_steps(training, training.batch_size * training.accumulate * recipe.text.sequence_length)
    return Setup(recipe, tokens, model, steps, device)


def train(recipe: Recipe, folder: Path, resume: Path | None = None, overwrite: bool = False) -> Outcome:
    """Train to the end of the recipe, or until a signal; `resume` is the checkpoint to go on from."""
    if not (resume or overwrite) and folder.exists() and any(folder.iterdir()):
        raise UsageError(
            f"{folder}: exists. Go on with it by --resume auto, replace it by --overwrite, or choose --out."
        )
    start = read.find(recipe.training.init_from) if recipe.training.init_from and not resume else None
    setup = set_up(recipe, resume or start)
    if overwrite and not resume:
        shutil.rmtree(folder, ignore_errors=True)
    _open_folder(folder, setup)

    signals = StopOnSignal()
    course = Course(folder, setup.tokens, setup.steps, signals)
    trainer = _trainer(folder, setup, [signals, course])
    learner = Learner(setup.model, setup.recipe, setup.steps, torch.from_numpy(setup.tokens.tokenizer.token_bytes))
    learner.train_dataloader = lambda: _loader(setup, trainer)  # type: ignore[method-assign]
    trainer.fit(learner, ckpt_path=resume, weights_only=True)
    gzip = gzip_bits_per_byte(setup.tokens.validation, setup.tokens.tokenizer) if course.final else None
    return Outcome(folder, trainer.global_step, course.final, gzip, signals.received)


def resume_point(folder: Path, resume: str | None) -> Path | None:
    """The checkpoint that --resume means: `auto` is the newest of the run that verifies, none if it has not begun."""
    if resume != "auto":
        return read.find(resume) if resume else None
    found = newest(folder)
    if found is None and folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder}: holds no checkpoint that verifies. Start anew with --overwrite.")
    return found


def _open_folder(folder: Path, setup: Setup) -> None:
    """Write down what the run is made of."""
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(recipe_file.dump(setup.recipe), encoding="utf-8")
    setup.tokens.tokenizer.save(folder / "tokenizer.model")
    packages = ("lmlong", "torch", "lightning", "sentencepiece", "safetensors", "numpy")
    environment = {
        "command": sys.argv,
        "begun": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
        "machine": platform.platform(),
        "device": torch.cuda.get_device_name() if setup.device.type == "cuda" else platform.processor(),
        "threads": torch.get_num_threads(),
        "parameters": parameters(setup.model),
        "text": setup.tokens.info,
    }
    (folder / "environment.json").write_text(json.dumps(environment, indent=2) + "\n", encoding="utf-8")


def _trainer(folder: Path, setup: Setup, callbacks: list) -> Trainer:
    """Lightning's Trainer without the parts that are done here: bars, checkpoints, samplers, summaries."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning.*")
    training = setup.recipe.training
    return Trainer(
        accelerator="gpu" if setup.device.type == "cuda" else "cpu",
        devices=1,
        precision=LIGHTNING[training.precision],  # type: ignore[arg-type]
        max_steps=setup.steps,
        max_epochs=-1,
        accumulate_grad_batches=training.accumulate,
        gradient_clip_val=training.clip,
        callbacks=callbacks,
        plugins=[FolderIO(recipe_file.dump(setup.recipe), (folder / "tokenizer.model").read_bytes())],
        logger=TensorBoardLogger(str(folder), name="", version="tensorboard") if training.tensorboard else False,
        log_every_n_steps=training.log_every,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def batches_of(setup: Setup) -> TrainingBatches:
    """The batches of a run, all of them, in order."""
    recipe, tokens = setup.recipe, setup.tokens
    return TrainingBatches(
        [file.tokens for file in tokens.train],
        tokens.weights,
        tokens.tokenizer.bos,
        tokens.tokenizer.eos,
        recipe.text.sequence_length,
        recipe.training.batch_size,
        recipe.seed,
    )


def _loader(setup: Setup, trainer: Trainer) -> Loader:
    """Batches from where the run stands."""
    first = trainer.global_step * setup.recipe.training.accumulate
    return Loader(batches_of(setup), first, trainer.global_rank, trainer.world_size)
