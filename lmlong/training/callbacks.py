"""The Lightning callback at the end of each step: logging, validation and checkpoints of a run."""

import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from textwrap import indent
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from lmlong.checkpoint.read import load_weights
from lmlong.checkpoint.write import Contents
from lmlong.data.tokenizers.base import Tokenizer
from lmlong.model.base import training_operations
from lmlong.model.device import peak_operations
from lmlong.model.language_model import LanguageModel
from lmlong.model.loop_guard import LoopGuard, lower_loops
from lmlong.model.metrics import METRICS, LossTotals, batch_tensors, loss_totals
from lmlong.model.sampling_options import DEFAULTS
from lmlong.recipe import file as recipe_file
from lmlong.report.progress import waiting
from lmlong.training.checkpoint_store import Best, CheckpointStore
from lmlong.training.distributed import all_reduce_sum, is_main_process
from lmlong.training.metrics_log import METRICS_FILE, MetricsLog
from lmlong.training.module import TrainingModule
from lmlong.training.prepare import PreparedRun, divides_weights
from lmlong.training.progress import FetchedFigures, Intervals, Progress, StepFigures, fetch
from lmlong.training.run_folder import check_exists
from lmlong.training.signals import StopOnSignal
from lmlong.training.training_state import restore, training_state

SPIKE = 1.5
"""A loss above this multiple of the median of recent steps is logged as an event."""


PATIENCE, MIN_PATIENCE = 1 / 3, 50
"""Share of a run without a better validation after which it ends, and the minimum number of steps."""


class TrainingCallback(Callback):
    """The callback at the end of each optimizer step, the only point where a run may be saved or stopped.

    Where reading a value waits for a GPU, the figures of steps are fetched only every `training.log_every` steps and
    before each validation and checkpoint, and only then several processes agree on their time and signals.
    """

    def __init__(self, folder: Path, prepared: PreparedRun, signals: StopOnSignal):
        self.folder, self.prepared, self.signals = folder, prepared, signals
        self.data = prepared.data
        options = prepared.recipe.training
        self.recipe_text = recipe_file.dump(prepared.recipe)
        self.metric = METRICS[prepared.recipe.objective]
        self.has_labels = prepared.recipe.objective == "label"
        shows_metric = options.teacher_of == "predictions" and not self.has_labels  # whose errors are not counted then
        self.training_metric = self.metric if shows_metric else None
        self.metrics_log = MetricsLog(folder / METRICS_FILE, silent=not is_main_process())
        self.checkpoints = CheckpointStore(folder / "checkpoints", options.keep_last, options.keep_every)
        self.progress: Progress | None = None
        self.pending: list[StepFigures] = []  # of steps since the last fetch
        self.fetched: list[FetchedFigures] = []  # of steps that are not logged yet
        self.unlogged_seconds = 0.0  # of these steps
        self.token_seconds: float | None = None  # that the matrix products of a token take at the peak of all devices
        self.final: LossTotals | None = None
        self.sampled = False  # whether `final` is of a sample of the validation text

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if self.prepared.state:
            restore(pl_module, self.prepared.state)
        recipe, clock, step = self.prepared.recipe, pl_module.clock, pl_module.step
        self.metrics_log.cut_back(step)
        per_target = self.data.tokens_per_target
        self.progress = Progress(clock, step, not trainer.is_global_zero, self.training_metric, per_target)
        self.intervals = Intervals(recipe.training, clock, step)
        peak = peak_operations(pl_module.device)
        if peak and not divides_weights(recipe):
            self.token_seconds = training_operations(pl_module.model) / (peak * trainer.world_size)
        self.best: Best | None = trainer.strategy.broadcast(self.checkpoints.best() if trainer.is_global_zero else None)
        if recipe.training.compile:
            self.progress.say("compiling the blocks and the loss in the first step; torch keeps them for later runs")
        clock.start()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        options = self.prepared.recipe.training
        if (batch_idx + 1) % options.accumulate:
            return
        step, clock = pl_module.step, pl_module.clock
        validates = self.intervals.validates(step)
        saves = validates or self.intervals.saves(step)
        is_due = saves or pl_module.policy.reads_values or step % options.log_every == 0
        self.pending.append(pl_module.take_figures())
        if is_due:
            self._fetch(pl_module)
        seconds = clock.step(trainer, is_due)
        self.unlogged_seconds += seconds
        if options.compile and step == pl_module.prepared.first_step + 1 and self.progress is not None:
            self.progress.say(f"compiled: {self.progress.name(step)} took {seconds:.0f} s")
        last = clock.ends_at(step)
        if is_due or last:
            self._log_steps(pl_module, last)
        with clock.pause():
            validated = None
            if last or validates:
                validated = self._score(pl_module, options.validation_tokens)
                self._log_validation(pl_module, "validation", validated)
                last = last or self._stops_early(pl_module, validated)
                if options.sample_tokens:
                    self._sample(pl_module, options.sample_tokens)
            stop = (is_due or last or trainer.world_size == 1) and self.signals.agree(trainer)
            if last or stop or saves:
                self._log_steps(pl_module, last)
                with self.signals.saving():
                    self._save(pl_module, validated)
                stop = stop or self.signals.agree(trainer)  # a signal during the save needs no further step
            if last and validated:
                self.final = self._final(pl_module, validated)
            trainer.should_stop = trainer.should_stop or stop or last

    def _stops_early(self, module: TrainingModule, validated: LossTotals) -> bool:
        """Return whether the run ends, since validation has not improved for long."""
        step, loss = module.step, self.metric.of(validated)
        if not module.is_judged:
            return False
        if math.isfinite(loss) and (self.best is None or loss < self.best.loss):
            self.best = Best(step, loss)
        if self.best is None:
            return False
        patience = max(PATIENCE * module.clock.expected_steps(step), MIN_PATIENCE)
        stops = module.recipe.training.early_stopping and step - self.best.step >= patience
        if stops and self.progress is not None:
            self.progress.say(
                f"{self.progress.name(step)}: ends early, the best validation was at step {self.best.step}"
            )
        return stops

    def _save(self, module: TrainingModule, validated: LossTotals | None) -> None:
        """Write a checkpoint of the step just done; all ranks call this, since each may hold a part of the state."""
        check_exists(self.folder)
        self.metrics_log.flush()
        self.intervals.saved()
        strategy, prepared = module.trainer.strategy, self.prepared
        contents = Contents(
            strategy.lightning_module_state_dict(),
            training_state(module),
            self.recipe_text,
            prepared.tokens.tokenizer.file,
            module.step,
            self.metric.of(validated) if validated and module.is_judged else None,
            prepared.tokens_before + module.step * prepared.recipe.tokens_per_step,
        )
        if strategy.is_global_zero:
            self.checkpoints.save(contents)
        else:
            contents.gather()
        strategy.barrier()

    def _fetch(self, module: TrainingModule) -> None:
        """Fetch the figures of the steps since the last fetch; all ranks call this together."""
        if self.pending:
            fetched, self.pending = fetch(self.pending), []
            totals = all_reduce_sum(module.trainer, [figures.totals for figures in fetched])
            self.fetched += [figures._replace(totals=total) for figures, total in zip(fetched, totals, strict=True)]

    def _log_steps(self, module: TrainingModule, last: bool) -> None:
        """Show and log all steps since the last call; `last` if the run ends after them."""
        self._fetch(module)
        if self.fetched:
            taken = self.unlogged_seconds / len(self.fetched)
            steps, self.fetched, self.unlogged_seconds = self.fetched, [], 0.0
            for figures in steps:
                module.check(figures)
                self._log_step(module, figures, taken, last and figures is steps[-1])

    def _log_step(self, module: TrainingModule, figures: FetchedFigures, taken: float, last: bool) -> None:
        """Show a step, and log it every `log_every` steps."""
        assert self.progress is not None
        step, totals = figures.step, figures.totals
        speed = self.progress.step(step, totals, figures.learning_rate, taken, last)
        self._log_event(module, figures)
        if step % module.recipe.training.log_every == 0 or last:
            check_exists(self.folder)
            metrics = {
                "loss": totals.nats_per_token,
                **({self.training_metric.name: self.training_metric.of(totals)} if self.training_metric else {}),
                "learning_rate": figures.learning_rate,
                "gradient_norm": figures.gradient_norm,
                "tokens_per_second": round(speed, 1),
                **({"mfu": speed * self.token_seconds} if self.token_seconds else {}),
            }
            self.metrics_log.write(step=step, **metrics)
            for logger in module.trainer.loggers:
                logger.log_metrics(metrics, step)

    def _log_event(self, module: TrainingModule, figures: FetchedFigures) -> None:
        """Log a skipped step, or a loss far above the recent losses."""
        loss, median = figures.totals.nats_per_token, statistics.median(module.recent) if module.recent else math.inf
        event = ""
        if figures.skipped:
            event = f"skipped, its gradient was not finite ({figures.skipped} in a row)"
        elif loss > SPIKE * median:
            event = f"the loss is {loss:.3f} after a median of {median:.3f}"
        if math.isfinite(loss):
            module.recent.append(loss)
        if event:
            assert self.progress is not None
            self.progress.say(f"{self.progress.name(figures.step)}: {event}")
            self.metrics_log.write(step=figures.step, event=event)

    def _final(self, module: TrainingModule, sample: LossTotals) -> LossTotals:
        """Return the loss of the best checkpoint, which commands load: on the even sample, unless the recipe asks for
        more of the text. `sample` is the loss on it after the last step."""
        options, tokens = module.recipe.training, len(self.prepared.tokens.validation.tokens)
        limit = options.final_validation_tokens
        self.sampled = limit is not None and max(limit, options.validation_tokens) < tokens
        needs_more = min(tokens, tokens if limit is None else limit) > options.validation_tokens
        best = self._load_best(module)
        if best == module.step and not needs_more:
            return sample
        with waiting("final validation") if module.trainer.is_global_zero else nullcontext():
            totals = self._score(module, limit if needs_more else options.validation_tokens)
        self._log_validation(module, "final_validation", totals, checkpoint=best)
        return totals

    def _load_best(self, module: TrainingModule) -> int:
        """Load the weights of the best checkpoint unless they are the current ones, and return its step."""
        strategy = module.trainer.strategy
        best = strategy.broadcast(self.checkpoints.best() if strategy.is_global_zero else None)
        if best is None or best.step == module.step:
            return module.step
        with strategy.model_sharded_context():
            load_weights(module.model, self.checkpoints.path(best.step))
        return best.step

    def _score(self, module: TrainingModule, limit: int | None) -> LossTotals:
        """Return the loss on the validation text, or on an even sample of it, in sequences of the training length."""
        trainer, carry_state = module.trainer, module.recipe.training.carry_state
        share = self.data.validation(limit, trainer.global_rank, trainer.world_size)
        batches = (batch_tensors(batch, module.device) for batch in share)
        with evaluating(module):
            own = loss_totals(module.model, batches, module.token_bytes, carry_state)
        return all_reduce_sum(trainer, [own])[0]

    def _log_validation(self, module: TrainingModule, name: str, totals: LossTotals, **more: Any) -> None:
        assert self.progress is not None
        metric, step, counts = self.metric, module.step, asdict(totals)
        ratios = {"nats_per_token": totals.nats_per_token, metric.name: metric.of(totals)}
        if self.has_labels:
            ratios |= {"accuracy": totals.accuracy, "accuracy_error": totals.accuracy_error}
            share = f"accuracy {totals.accuracy:.3f} ± {totals.accuracy_error:.3f}"
            measured = f"{share} over {totals.tokens:,} documents, {totals.nats_per_token:.3f} nats/label"
        else:
            del counts["correct"]
            nats = f"{totals.nats_per_token:.3f} nats/token over {totals.tokens:,} tokens"
            measured = f"{metric.of(totals):.3f} {metric.unit}, {nats}"
        self.metrics_log.write(step=step, **{name: {**counts, **ratios}, **more})
        for logger in module.trainer.loggers:
            logger.log_metrics({f"{name}/{key}": value for key, value in ratios.items()}, step)
        label = name.replace("_", " ")
        self.progress.say(f"{self.progress.name(step)}: {label} {measured}")

    def _sample(self, module: TrainingModule, tokens: int) -> None:
        """Show a text generated by the model; all ranks generate it, since each may hold only a part of the weights."""
        assert self.progress is not None and isinstance(module.model, LanguageModel)
        with evaluating(module):
            text = write_sample(module.model, self.prepared.tokens.tokenizer, tokens, module.recipe.seed)
        self.metrics_log.write(step=module.step, sample=text)
        self.progress.say(f"{self.progress.name(module.step)}: a sample\n{indent(text, '    ')}")

    def close(self) -> None:
        """Remove the progress from the terminal."""
        if self.progress is not None:
            self.progress.close()


@contextmanager
def evaluating(module: TrainingModule) -> Iterator[None]:
    """Switch a module to evaluation mode, in the number format of training."""
    module.eval()
    with module.trainer.precision_plugin.forward_context():
        yield
    module.train()


@torch.no_grad()
def write_sample(model: LanguageModel, tokenizer: Tokenizer, tokens: int, seed: int) -> str:
    """Return `tokens` tokens of text, one document after another, with the default sampling options.

    It uses a separate random generator, so training continues as if there had been no sample.
    """
    draw = torch.Generator().manual_seed(seed)
    token, state, written, guard = tokenizer.bos, None, [], LoopGuard(DEFAULTS)
    for _ in range(tokens):
        read = torch.tensor([[token]], device=model.embedding.weight.device)
        hidden, state = model(read, state, read == tokenizer.bos)
        logits = lower_loops(model.logits(hidden[:, -1]).float().cpu(), [guard])
        token = int(torch.multinomial((logits[0] / DEFAULTS.temperature).softmax(-1), 1, generator=draw))
        written.append(token)
        guard.append(token)
        if token == tokenizer.eos:
            token, guard = tokenizer.bos, LoopGuard(DEFAULTS)
    return tokenizer.decode(written)
