"""Lightning callbacks: logging, validation and checkpoints of a run, and resampling of random features."""

import math
import statistics
from collections import deque
from dataclasses import asdict
from pathlib import Path
from textwrap import indent
from typing import Any

from lightning.pytorch import Callback, Trainer

from lmlong.attention.favor import Favor
from lmlong.data.data_module import DataModule
from lmlong.errors import LmlongError
from lmlong.model.base import TextModel
from lmlong.model.language_model import LanguageModel
from lmlong.model.metrics import METRICS, LossTotals, loss_totals
from lmlong.training.checkpoint_store import CheckpointStore
from lmlong.training.clock import TrainingClock
from lmlong.training.distributed import all_reduce_sum, is_main_process
from lmlong.training.metrics_log import MetricsLog
from lmlong.training.module import TrainingModule, as_tensors
from lmlong.training.progress import Progress
from lmlong.training.sample import write_sample
from lmlong.training.signals import StopOnSignal
from lmlong.training.state import Owners, random_states, restore
from lmlong.training.state_health import StateHealth

RECENT = 20
SPIKE = 1.5
"""A loss above this many times the median of the last steps is logged."""


class TrainingCallback(Callback):
    """The callback at the end of each optimizer step, the only point where a run may be saved or stopped."""

    def __init__(
        self,
        run: Path,
        data: DataModule,
        clock: TrainingClock,
        signals: StopOnSignal,
        tokens_before: int,
        owners: Owners,
    ):
        self.run, self.data, self.clock, self.signals = run, data, clock, signals
        self.tokens_before = tokens_before  # trained on by the run that this one began from
        self.owners = owners
        options = data.recipe.training
        self.metric = METRICS[data.recipe.objective]
        self.of_training = self.metric if options.teacher_of == "predictions" else None
        self.metrics_log = MetricsLog(run / "metrics.jsonl", silent=not is_main_process())
        self.checkpoints = CheckpointStore(run / "checkpoints", options.keep_last, options.keep_every)
        self.progress: Progress | None = None
        self.recent: deque[float] = deque(maxlen=RECENT)  # losses, to detect a spike
        self.final: LossTotals | None = None
        self.sampled = False  # whether that is not of the whole validation text
        self._random: dict[str, Any] = {}  # to be restored

    def state_dict(self) -> dict[str, Any]:
        return {"recent": list(self.recent), **self.owners._asdict(), "random": random_states()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.recent.extend(state_dict["recent"])
        self._random = state_dict["random"]

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if self._random:
            restore(self._random)
        self.metrics_log.cut_back(trainer.global_step)
        recipe, silent = self.data.recipe, not trainer.is_global_zero
        tokens_per_target = recipe.text.sequence_length / recipe.targets_per_sequence
        self.progress = Progress(self.clock, trainer.global_step, silent, self.of_training, tokens_per_target)
        self.clock.start()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        options = pl_module.recipe.training
        if (batch_idx + 1) % options.accumulate:
            return
        assert self.progress is not None
        step, taken = trainer.global_step, self.clock.step(trainer)
        last = self.clock.ends_at(step)
        self._log_step(step, pl_module, taken)
        with self.clock.pause():
            validated = None
            if last or step % options.validate_every == 0:
                validated = self._validate(trainer, pl_module)
                self.final = self._final(trainer, pl_module, validated) if last else None
                if options.sample_tokens:
                    self._sample(trainer, pl_module, options.sample_tokens)
            stop = self.signals.agree(trainer)
            if last or stop or step % options.checkpoint_every == 0:
                check_there(self.run)
                self.metrics_log.flush()
                worth = self.metric.of(validated) if validated else None
                with self.signals.saving():
                    self.checkpoints.save(trainer, worth, self.tokens_at(step))
                stop = stop or self.signals.agree(trainer)  # one that came meanwhile needs no further step
            trainer.should_stop = trainer.should_stop or stop or last

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self._close()

    def _log_step(self, step: int, module: TrainingModule, taken: float) -> None:
        """Show the step, and log it every `log_every` steps."""
        assert self.progress is not None
        totals, module.step_totals = all_reduce_sum(module.trainer, module.step_totals), LossTotals()
        options = module.recipe.training
        learning_rate = module.learning_rate
        speed = self.progress.step(step, totals, learning_rate, taken)
        self._log_event(step, totals.nats_per_token, module.skipped)
        if step % options.log_every == 0 or self.clock.ends_at(step):
            check_there(self.run)
            metrics = {
                "loss": totals.nats_per_token,
                **({self.of_training.name: self.of_training.of(totals)} if self.of_training else {}),
                "learning_rate": learning_rate,
                "gradient_norm": module.gradient_norm,
                "tokens_per_second": round(speed, 1),
            }
            self.metrics_log.write(step=step, **metrics)
            for logger in module.trainer.loggers:
                logger.log_metrics(metrics, step)

    def _log_event(self, step: int, loss: float, skipped: int) -> None:
        """Log a skipped step, or a loss far above those before it."""
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
            self.progress.say(f"{self.progress.name(step)}: {event}")
            self.metrics_log.write(step=step, event=event)

    def _final(self, trainer: Trainer, module: TrainingModule, sample: LossTotals) -> LossTotals:
        """Return the loss after the last step: that of the even sample, unless more of the text is to be scored."""
        options, tokens = module.recipe.training, len(self.data.tokens.validation.tokens)
        limit = options.final_validation_tokens
        self.sampled = limit is not None and max(limit, options.validation_tokens) < tokens
        if min(tokens, tokens if limit is None else limit) <= options.validation_tokens:
            return sample
        totals = self._score(trainer, module, limit)
        self._log_validation(trainer, "final_validation", totals)
        return totals

    def _validate(self, trainer: Trainer, module: TrainingModule) -> LossTotals:
        """Return the loss on the even sample, and log it, and what the states of the model keep."""
        health = StateHealth(module.model)
        with health.watch():
            totals = self._score(trainer, module, module.recipe.training.validation_tokens)
        by_layer = health.by_layer(trainer)
        self._log_validation(trainer, "validation", totals, **({"state": by_layer} if by_layer else {}))
        return totals

    def _score(self, trainer: Trainer, module: TrainingModule, limit: int | None) -> LossTotals:
        """Return the loss on the validation text or an even sample of it, in sequences as long as those of training."""
        carry_state = module.recipe.training.carry_state
        share = self.data.validation(limit, trainer.global_rank, trainer.world_size)
        batches = (to_device(as_tensors(batch), module.device) for batch in share)
        module.eval()
        with trainer.precision_plugin.forward_context():
            own = loss_totals(module.model, batches, module.token_bytes, carry_state)
        module.train()
        return all_reduce_sum(trainer, own)

    def _log_validation(self, trainer: Trainer, name: str, totals: LossTotals, **more: Any) -> None:
        assert self.progress is not None
        metric = self.metric
        ratios = {"nats_per_token": totals.nats_per_token, metric.name: metric.of(totals)}
        self.metrics_log.write(step=trainer.global_step, **{name: {**asdict(totals), **ratios}, **more})
        for logger in trainer.loggers:
            logger.log_metrics({f"{name}/{key}": value for key, value in ratios.items()}, trainer.global_step)
        label = name.replace("_", " ")
        self.progress.say(
            f"{self.progress.name(trainer.global_step)}: {label} {metric.of(totals):.3f} {metric.unit}, "
            f"{totals.nats_per_token:.3f} nats/token over {totals.tokens:,} tokens"
        )

    def _sample(self, trainer: Trainer, module: TrainingModule, tokens: int) -> None:
        """Show a text that the model writes; all ranks write it, since each may hold only a part of the weights."""
        assert self.progress is not None and isinstance(module.model, LanguageModel)
        module.eval()
        with trainer.precision_plugin.forward_context():
            text = write_sample(module.model, self.data.tokens.tokenizer, tokens, self.data.recipe.seed)
        module.train()
        self.metrics_log.write(step=trainer.global_step, sample=text)
        self.progress.say(f"{self.progress.name(trainer.global_step)}: a sample\n{indent(text, '    ')}")

    def tokens_at(self, step: int) -> int:
        """Return the tokens trained on after a step, those of the run that this one began from among them."""
        return self.tokens_before + step * self.data.recipe.tokens_per_step

    def _close(self) -> None:
        if self.progress is not None:
            self.progress.close()


def check_there(run: Path) -> None:
    """Refuse to go on without the run folder: a new one of its name would hold the rest of the run alone."""
    if not run.is_dir():
        raise LmlongError(
            f"{run}: the run folder was moved or removed while it trained. Go on from its last checkpoint by "
            "--resume auto, with --out where it is now."
        )


def to_device(tensors: tuple[Any, ...], device: Any) -> tuple[Any, ...]:
    return tuple(tensor.to(device) for tensor in tensors)


class ResampleFeatures(Callback):
    """Resampling of random features before a step, never within one: each draw is a function of the seed and the step,
    so a resumed run has it too.

    A training sequence is read from an empty state, so no state ever meets another draw than its own.
    """

    def __init__(self, model: TextModel, seed: int, every: int):
        self.maps = [module for module in model.modules() if isinstance(module, Favor)]
        self.seed, self.every = seed, every
        self.number = 0  # the current draw; the model was built with draw 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        number = trainer.global_step // self.every
        if number == self.number:
            return
        self.number = number
        for layer, features in enumerate(self.maps):
            features.resample(hash((self.seed, number, layer)) % 2**63)
