"""The course of a run, step by step: what is logged, validated and saved, and when."""

import math
import statistics
from collections import deque
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from lmlong.model.scoring import FIGURES, Totals, score
from lmlong.text.material import Material
from lmlong.training.checkpoints import Checkpoints
from lmlong.training.journal import Journal
from lmlong.training.launch import is_first
from lmlong.training.loader import as_tensors
from lmlong.training.module import Learner
from lmlong.training.optimizer import rate
from lmlong.training.progress import Progress
from lmlong.training.randomness import random_states, restore
from lmlong.training.ranks import summed
from lmlong.training.signals import StopOnSignal

RECENT = 20
SPIKE = 1.5
"""A loss more than so many times the median of the last steps is noted."""


class Course(Callback):
    """Acts at the end of each optimizer step, the only place where a run may be saved or stopped."""

    def __init__(self, run: Path, material: Material, steps: int, signals: StopOnSignal):
        self.material, self.steps, self.signals = material, steps, signals
        options = material.recipe.training
        self.figure = FIGURES[material.recipe.objective]
        self.journal = Journal(run / "metrics.jsonl", silent=not is_first())
        self.checkpoints = Checkpoints(run / "checkpoints", options.keep_last, options.keep_every)
        self.progress: Progress | None = None
        self.recent: deque[float] = deque(maxlen=RECENT)  # losses, to see a spike by
        self.final: Totals | None = None
        self._random: dict[str, Any] = {}  # to be restored

    def state_dict(self) -> dict[str, Any]:
        return {"recent": list(self.recent), "text": self.material.tokens.identity, "random": random_states()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.recent.extend(state_dict["recent"])
        self._random = state_dict["random"]

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if self._random:
            restore(self._random)
        self.journal.cut_back(trainer.global_step)
        recipe, silent = self.material.recipe, not trainer.is_global_zero
        tokens_per_target = recipe.text.sequence_length / recipe.targets_per_sequence
        self.progress = Progress(self.steps, trainer.global_step, silent, self.figure, tokens_per_target)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        options = pl_module.recipe.training
        if (batch_idx + 1) % options.accumulate:
            return
        assert self.progress is not None
        step, last = trainer.global_step, trainer.global_step == self.steps
        self._report(step, pl_module)
        with self.progress.pause():
            validated = None
            if last or step % options.validate_every == 0:
                validated = self._validate(trainer, pl_module, None if last else options.validation_tokens)
                self.final = validated if last else None
            stop = self.signals.agree(trainer)
            if last or stop or step % options.checkpoint_every == 0:
                self.journal.flush()
                self.checkpoints.save(trainer, self.figure.of(validated) if validated else None)
            trainer.should_stop = trainer.should_stop or stop

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self._close()

    def _report(self, step: int, learner: Learner) -> None:
        """Show the step and, now and then, write it down."""
        assert self.progress is not None
        totals, learner.step_totals = summed(learner.trainer, learner.step_totals), Totals()
        options = learner.recipe.training
        learning_rate = options.learning_rate * rate(step - 1, self.steps, options)
        speed = self.progress.step(step, totals, learning_rate)
        self._note(step, totals.nats_per_token, learner.skipped)
        if step % options.log_every == 0 or step == self.steps:
            metrics = {
                "loss": totals.nats_per_token,
                self.figure.name: self.figure.of(totals),
                "learning_rate": learning_rate,
                "gradient_norm": learner.gradient_norm,
                "tokens_per_second": round(speed, 1),
            }
            self.journal.write(step=step, **metrics)
            for logger in learner.trainer.loggers:
                logger.log_metrics(metrics, step)

    def _note(self, step: int, loss: float, skipped: int) -> None:
        """Write down what is out of the ordinary: a step left out, or a loss far above those before it."""
        usual = statistics.median(self.recent) if self.recent else math.inf
        event = ""
        if skipped:
            event = f"left out, its gradient was not finite ({skipped} in a row)"
        elif loss > SPIKE * usual:
            event = f"the loss is {loss:.3f} after a usual {usual:.3f}"
        if math.isfinite(loss):
            self.recent.append(loss)
        if event:
            assert self.progress is not None
            self.progress.say(f"step {step}/{self.steps}: {event}")
            self.journal.write(step=step, event=event)

    def _validate(self, trainer: Trainer, learner: Learner, limit: int | None) -> Totals:
        """What is lost on the validation text, in sequences as long as those of training."""
        assert self.progress is not None
        ranks, figure = trainer.world_size, self.figure
        share = islice(self.material.validation(limit, ranks), trainer.global_rank, None, ranks)
        learner.eval()
        with trainer.precision_plugin.forward_context():
            own = score(learner.model, (to_device(as_tensors(b), learner.device) for b in share), learner.token_bytes)
        totals = summed(trainer, own)
        learner.train()
        ratios = {"nats_per_token": totals.nats_per_token, figure.name: figure.of(totals)}
        self.journal.write(step=trainer.global_step, validation={**asdict(totals), **ratios})
        for logger in trainer.loggers:
            logger.log_metrics({f"validation/{name}": value for name, value in ratios.items()}, trainer.global_step)
        self.progress.say(
            f"step {trainer.global_step}/{self.steps}: validation {figure.of(totals):.3f} {figure.unit}, "
            f"{totals.nats_per_token:.3f} nats/token over {totals.tokens:,} tokens"
        )
        return totals

    def _close(self) -> None:
        if self.progress is not None:
            self.progress.close()


def to_device(tensors: tuple[Any, ...], device: Any) -> tuple[Any, ...]:
    return tuple(tensor.to(device) for tensor in tensors)
