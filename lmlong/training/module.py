"""One training step, from a batch to the update of the weights.

For each of the `training.accumulate` batches of a step, Lightning calls `on_train_batch_start`, which sets the learning
rate, then `training_step`, which returns the loss, and adds up the gradient. At the last batch of a step it calls the
optimizer with a closure that runs `training_step`, backward and `configure_gradient_clipping` before the update.
(DeepSpeed clips and updates by itself: `DeepSpeedAutocast.optimizer_step`.)

Nothing here waits for a value of a GPU. There an update with a non-finite gradient is masked, and `TrainingCallback`
fetches the figures of several steps at once; on a CPU the gradient is dropped. Three exceptions read a value by
themselves: DeepSpeed and the gradient scaler of float16 whether each gradient is finite, and Lightning, where there are
several processes, whether one has had a signal, before each batch.
"""

import math
import random
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lmlong.attention.device_policy import DevicePolicy, policy_of, use_policy
from lmlong.attention.favor import Favor
from lmlong.errors import DivergedError
from lmlong.model.base import round_weights
from lmlong.model.kernel_check import checked_kernels
from lmlong.model.language_model import LanguageModel
from lmlong.model.segments import loss_of_part, text_loss
from lmlong.model.sequence_group import SequenceGroup, longest_part
from lmlong.model.state import detach_state, where_state
from lmlong.training.distillation import taught_loss
from lmlong.training.loader import Loader, TrainingBatch
from lmlong.training.optimizer import learning_rate_factor, make_optimizer, masks_updates, set_learning_rate
from lmlong.training.prepare import PreparedRun, divides_weights, model_to_check
from lmlong.training.progress import BatchFigures, FetchedFigures, StepFigures, TrainingClock
from lmlong.training.row_adagrad import RowAdagrad, make_row_optimizer

RECENT = 20
"""Number of recent losses kept to detect a spike."""

QUANTIZED_SHARE = 0.25
"""Share of the steps, the last ones, in which `training.quantize` rounds the weights."""


class TrainingModule(LightningModule):
    """The Lightning module of a run, with the figures of the current step for the callbacks.

    `policy` is the device's by default; the GPU's can be tested on a CPU.
    """

    token_bytes: Tensor
    skipped: Tensor
    """The number of consecutive steps skipped so far; above `skips_allowed` no more updates are made, except by
    DeepSpeed."""

    def __init__(self, prepared: PreparedRun, policy: DevicePolicy | None = None):
        super().__init__()
        self.prepared, self.recipe = prepared, prepared.recipe
        self.given_policy, self.policy = policy, policy or policy_of(prepared.device)
        training = prepared.recipe.training
        self.skips_allowed = training.skips if training.on_nonfinite == "skip" else 0
        self.model, self.teacher = prepared.model, prepared.teacher
        for model in (self.model, *([self.teacher.model] if self.teacher else [])):
            use_policy(model, policy)
        seconds = prepared.state["seconds"] if prepared.state else 0.0
        self.clock = TrainingClock(self.recipe.training, prepared.steps, seconds)
        self.remaining_steps = self.clock.remaining_steps(prepared.first_step)
        self.first_batch = prepared.first_step * self.recipe.training.accumulate
        self.register_buffer("token_bytes", torch.from_numpy(prepared.tokens.tokenizer.token_bytes), persistent=False)
        self.register_buffer("skipped", torch.zeros((), dtype=torch.int64), persistent=False)
        # whether validation measures what is trained: predictions, with rounded weights where they are
        self.is_judged = not (training.quantize or training.teacher_of == "layers")
        self.learning_rate = math.nan  # of the current optimizer step
        self.features_drawn = 0  # how often random features were redrawn since the model was built
        self.row_optimizer: RowAdagrad | None = None  # of the model's tables
        self.figures: list[BatchFigures] = []  # of the current optimizer step
        self.gradient_norm = torch.tensor(math.nan)
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.carried: Any = None  # the state after the previous batch, if the recipe passes it on
        self.kernels: dict[str, str] = {}  # by kinds of attention; of a language model
        self.group: SequenceGroup | None = None  # that reads parts of the same rows

    @property
    def step(self) -> int:
        """Optimizer steps taken since the run began, including those before a resume."""
        return self.prepared.first_step + self.trainer.global_step

    def setup(self, stage: str) -> None:
        """Check the kernels, while the device is still empty."""
        if self.teacher:
            self._check_kernels(self.teacher.model, trains=False)
        if isinstance(self.model, LanguageModel):
            self.kernels = self._check_kernels(model_to_check(self.prepared), trains=True)
            if (parts := self.recipe.training.sequence_parallel) > 1:
                self.group = SequenceGroup(self.trainer.global_rank, self.trainer.world_size, parts)

    def configure_model(self) -> None:
        """Build the model again where the ranks divide its weights, within the strategy's context, which does that."""
        if divides_weights(self.recipe):
            del self.model  # after an error, Lightning would move the outline, which has no memory
            self.model = self.prepared.build()
            use_policy(self.model, self.given_policy)
            if isinstance(self.model, LanguageModel):
                self.model.use_kernels(self.kernels)

    def on_fit_start(self) -> None:
        if self.teacher:
            self.teacher.model.to(self.device)  # of each process

    def train_dataloader(self) -> Loader:
        """Return the batches of the remaining steps."""
        batches = self.remaining_steps * self.recipe.training.accumulate
        numbers = range(self.first_batch, self.first_batch + batches)
        return Loader(self.prepared, numbers, self.trainer.global_rank)

    def configure_optimizers(self) -> Any:
        ranks = self.trainer.world_size
        self.row_optimizer = make_row_optimizer(self.model, self.policy.reads_values, ranks)
        return make_optimizer(self.model, self.recipe.training, self.policy, ranks)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Set the learning rate, the rounding of weights and random features by the step, and by the time trained if
        `training.minutes` ends the run."""
        options = self.recipe.training
        factor = learning_rate_factor(self.step, self.clock.expected_steps(self.step), options)
        self.learning_rate = options.learning_rate * factor
        set_learning_rate(self.trainer.optimizers[0], self.learning_rate)
        if options.quantize and isinstance(self.model, LanguageModel):
            self.is_judged = self.in_last(QUANTIZED_SHARE)
            round_weights(self.model, options.quantize if self.is_judged else None)
        if every := self.recipe.model.attention.favor.resample_every:
            self._resample_features(self.step // every)

    def training_step(self, batch: TrainingBatch, batch_idx: int) -> Tensor:
        number = self.first_batch + batch_idx
        self._seed(number)
        state, mask = self._initial_state(batch)
        loss_of = self._loss_function()
        with self.trainer.precision_plugin.forward_context():
            losses, state = loss_of(self.model, batch.tokens, batch.targets, mask, state)
        if self.recipe.training.passes_states:
            self.carried = detach_state(state if self.group is None else self.group.state_after(state))
        if self.row_optimizer:
            rows, length = batch.tokens.shape
            self.row_optimizer.expect(rows * longest_part(length, self.recipe.training.sequence_parallel))
        learned, nll = losses.flatten()[0], losses.detach().flatten()[-1]
        self.figures.append(BatchFigures(number, batch.counts, learned.detach(), nll))
        # divided by a constant, so that batches, ranks and accumulated parts add up to the same gradient; the mean over
        # the ranks of the gradients of the parts of a row is multiplied by their number
        training, targets = self.recipe.training, self.recipe.targets_per_sequence
        return learned * training.sequence_parallel / (training.batch_size * targets)

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        training = self.recipe.training
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), training.clip)
        if training.precision == "16":
            # overflows now and then by design: its gradient scaler skips such a step and lowers the scale
            self.gradient_norm = norm
            self.update_rows(~norm.isfinite())
            return
        is_skipped = self.must_skip(norm)
        self.update_rows(is_skipped)
        if masks_updates(training, self.policy):
            optimizer.found_inf = is_skipped.float()
        elif is_skipped:
            for weight in self.model.parameters():
                weight.grad = None  # the optimizer then skips the weight and its moments

    def update_rows(self, is_skipped: Tensor) -> None:
        """Update the rows of tables that this step looked up, unless the step is skipped."""
        if self.row_optimizer:
            scaler = getattr(self.trainer.precision_plugin, "scaler", None)
            factor = self.learning_rate / self.recipe.training.learning_rate
            self.row_optimizer.step(factor, is_skipped, scaler.get_scale() if scaler else 1.0)

    def must_skip(self, norm: Tensor) -> Tensor:
        """Count a gradient of this norm, and return whether its update must be skipped: if it is not finite, or after
        more skipped steps than allowed, until the run stops. A non-finite loss always has a non-finite gradient."""
        self.gradient_norm = norm
        is_skipped = ~norm.isfinite() | (self.skipped > self.skips_allowed)
        self.skipped = (self.skipped + 1) * is_skipped
        if self.carried is not None:  # it may contain non-finite numbers
            if not self.policy.reads_values:
                rows = self.recipe.training.batch_size
                self.carried = where_state(is_skipped, self.model.init_state(rows), self.carried)
            elif is_skipped:
                self.carried = None
        return is_skipped

    def take_figures(self) -> StepFigures:
        """Return the figures of the step just done, which stay on the device, and begin those of the next."""
        batches, self.figures = self.figures, []
        return StepFigures(self.step, self.learning_rate, batches, self.gradient_norm, self.skipped)

    def check(self, figures: FetchedFigures) -> None:
        """Raise an error if the run has to stop at this step. All ranks stop together, since they share the gradient;
        if only one stopped for its own loss, the others would hang."""
        training = self.recipe.training
        diverged = figures.skipped > self.skips_allowed
        if training.on_nonfinite == "skip":
            if diverged:
                raise _diverged(figures.step, f"{figures.skipped} steps in a row had a gradient that is not finite")
            return
        if diverged or self.trainer.world_size == 1:
            for number, loss in figures.losses.items():
                if not math.isfinite(loss):
                    raise _diverged(figures.step, f"the loss of batch {number} is {loss}")
        if diverged:
            raise _diverged(figures.step, f"the norm of the gradient is {figures.gradient_norm}")

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return only the model's weights, under the model's own names."""
        return self.model.state_dict()

    def _initial_state(self, batch: TrainingBatch) -> tuple[Any, Tensor]:
        """Return the state to read a batch from, and its mask.

        With `state_passing`, a share of the rows begins with the state after the same row of the previous batch, and no
        document starts there.
        """
        if self.carried is None or batch.passed is None:
            return self.carried, batch.mask
        mask = batch.mask.clone()
        mask[:, 0] &= ~batch.passed
        return where_state(batch.passed, self.carried, self.model.init_state(len(mask))), mask

    def _loss_function(self) -> Callable[..., tuple[Tensor, Any]]:
        """Return the function from the model, tokens, targets, mask and state to the loss, and the state after the
        tokens that this process reads. A loss of two numbers is the one to minimize and the one to report."""
        if self.teacher is not None:
            return partial(taught_loss, teacher=self.teacher, segment=self.recipe.training.segment)
        if self.group is not None:
            return partial(loss_of_part, group=self.group)
        training = self.recipe.training
        return partial(text_loss, segment=training.segment, wants_state=training.passes_states)

    def in_last(self, share: float) -> bool:
        """Return whether this step is in the last share of the expected steps."""
        return self.step >= (1 - share) * self.clock.expected_steps(self.step)

    def _resample_features(self, number: int) -> None:
        """Redraw random features, unless they are those of this draw already. A draw is a function of the seed and its
        number, so a resumed run repeats it.

        A state is always used with the draw that it was computed with: recipes refuse resampling together with carried
        or passed states, so each training sequence begins from an empty state.
        """
        if number != self.features_drawn:
            self.features_drawn = number
            maps = [module for module in self.model.modules() if isinstance(module, Favor)]
            for layer, features in enumerate(maps):
                features.resample(hash((self.recipe.seed, number, layer)) % 2**63)

    def _check_kernels(self, model: LanguageModel, trains: bool) -> dict[str, str]:
        """Set and return the kernels that rank 0 has checked for all ranks."""
        names: dict[str, str] = {}
        if self.trainer.is_global_zero:
            device = self.trainer.strategy.root_device
            names, refused = checked_kernels(model, self.recipe.training.precision, trains, device)
            for line in refused:
                print(line, file=sys.stderr)
        names = self.trainer.strategy.broadcast(names)
        model.use_kernels(names)
        return names

    def _seed(self, number: int) -> None:
        """Seed random draws, of dropout and of plug-ins, by the batch, so that a resumed run repeats them. Ranks that
        read the parts of the same rows draw the same numbers."""
        group = self.global_rank // self.recipe.training.sequence_parallel
        seed = hash((self.recipe.seed, number, group)) % 2**63
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)


def _diverged(step: int, what: str) -> DivergedError:
    return DivergedError(
        f"step {step}: {what}. The weights are those of step {step - 1}. "
        "Lower training.learning_rate, or resume from the last checkpoint with --resume auto."
    )
