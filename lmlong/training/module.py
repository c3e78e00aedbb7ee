"""One training step, from a batch to the update of the weights.

For each of the `training.accumulate` batches of a step, Lightning calls `on_train_batch_start`, which sets the learning
rate, then `training_step`, which returns the loss, and adds up the gradient. At the last batch of a step it calls the
optimizer with a closure that runs `training_step`, backward and `configure_gradient_clipping` before the update.
(DeepSpeed clips and updates by itself: `DeepSpeedAutocast.optimizer_step`.)
"""

import math
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lmlong.data.batches import TrainingBatches
from lmlong.data.shuffle import draw
from lmlong.errors import DivergedError
from lmlong.model.kernel_choice import Decision, KernelChoice, choose_kernels
from lmlong.model.kernel_trial import Work
from lmlong.model.language_model import LanguageModel
from lmlong.model.loss import IGNORED
from lmlong.model.metrics import LossTotals, batch_tensors, count_bytes
from lmlong.model.state import detach_state, where_state
from lmlong.training.distillation import taught_loss
from lmlong.training.distributed import print_once
from lmlong.training.optimizer import learning_rate_factor, make_optimizer
from lmlong.training.prepare import PreparedRun
from lmlong.training.progress import TrainingClock

PASSED = 1
"""Part of the random key that selects the rows of `state_passing`."""

RECENT = 20
"""Number of recent losses kept to detect a spike."""


class TrainingModule(LightningModule):
    """The Lightning module of a run, with the figures of the current step for the callbacks."""

    token_bytes: Tensor

    def __init__(self, prepared: PreparedRun):
        super().__init__()
        self.prepared, self.recipe = prepared, prepared.recipe
        self.model, self.teacher = prepared.model, prepared.teacher
        seconds = prepared.state["seconds"] if prepared.state else 0.0
        self.clock = TrainingClock(self.recipe.training, prepared.steps, seconds)
        self.remaining_steps = self.clock.remaining_steps(prepared.first_step)
        self.batches = prepared.data.training()
        self.first_batch = prepared.first_step * self.recipe.training.accumulate
        self.register_buffer("token_bytes", torch.from_numpy(prepared.tokens.tokenizer.token_bytes), persistent=False)
        self.step_totals = LossTotals()  # of the current optimizer step
        self.learning_rate = math.nan  # of the current optimizer step
        self.gradient_norm = math.nan
        self.skipped = 0  # consecutive steps skipped so far
        self.recent: deque[float] = deque(maxlen=RECENT)
        self.carried: Any = None  # the state after the previous batch, if the recipe passes it on
        self.kernels: KernelChoice | None = None  # of a language model

    @property
    def step(self) -> int:
        """Optimizer steps taken since the run began, including those before a resume."""
        return self.prepared.first_step + self.trainer.global_step

    def setup(self, stage: str) -> None:
        """Choose the kernels, while the device is still empty."""
        work, known = self.prepared.work, self.prepared.kernels
        if self.teacher:
            self._choose_kernels(self.teacher.model, work._replace(trains=False))
        if isinstance(self.model, LanguageModel):
            decision = self._choose_kernels(self.model, work, known)
            self.kernels = decision.choice
            if line := decision.line(known):
                print_once(line)

    def on_fit_start(self) -> None:
        if self.teacher:
            self.teacher.model.to(self.device)  # of each process

    def train_dataloader(self) -> "Loader":
        """Return the batches of the remaining steps."""
        batches = self.remaining_steps * self.recipe.training.accumulate
        numbers = range(self.first_batch, self.first_batch + batches)
        return Loader(self.batches, numbers, self.trainer.global_rank, self.trainer.world_size)

    def configure_optimizers(self) -> Any:
        return make_optimizer(self.model, self.recipe.training)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Set the learning rate by the step, and by the time trained if `training.minutes` ends the run."""
        options = self.recipe.training
        factor = learning_rate_factor(self.step, self.clock.expected_steps(self.step), options)
        self.learning_rate = options.learning_rate * factor
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = self.learning_rate * group["lr_scale"]

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets, mask = batch
        number = self.first_batch + batch_idx
        self._seed(number)
        state, mask = self._initial_state(tokens, mask, number)
        with self.trainer.precision_plugin.forward_context():
            segment = self.recipe.training.segment
            learned, nll, state = taught_loss(self.model, self.teacher, tokens, targets, mask, state, segment)
        if self.recipe.training.passes_states:
            self.carried = detach_state(state)
        loss = float(learned.detach())
        # with several ranks, only the shared gradient is checked: a single rank that stopped would hang the others
        single_process = self.trainer.world_size == 1
        if not math.isfinite(loss) and single_process and self.recipe.training.on_nonfinite == "stop":
            raise DivergedError(self._diverged(f"the loss of batch {number} is {loss}"))
        self.step_totals += LossTotals(
            float(nll), int((targets != IGNORED).sum()), count_bytes(targets, self.token_bytes)
        )
        # divided by a constant, so that batches, ranks and accumulated parts add up to the same gradient
        return learned / (len(targets) * self.recipe.targets_per_sequence)

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.training.clip)
        if not self.accept(float(norm)):
            for weight in self.model.parameters():
                weight.grad = None  # the optimizer then skips the weight and its moments

    def accept(self, norm: float) -> bool:
        """Return whether a gradient of this norm may update the weights: only if it is finite. A non-finite loss always
        has a non-finite gradient."""
        training = self.recipe.training
        self.gradient_norm = norm
        # float16 overflows now and then by design: its gradient scaler skips such a step and lowers the scale
        if math.isfinite(norm) or training.precision == "16":
            self.skipped = 0
            return True
        if training.on_nonfinite == "stop":
            raise DivergedError(self._diverged(f"the norm of the gradient is {norm}"))
        self.skipped += 1
        if self.skipped > training.skips:
            raise DivergedError(self._diverged(f"{self.skipped} steps in a row had a gradient that is not finite"))
        self.carried = None  # it may contain non-finite numbers
        return False

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return only the model's weights, under the model's own names."""
        return self.model.state_dict()

    def _initial_state(self, tokens: Tensor, mask: Tensor, number: int) -> tuple[Any, Tensor]:
        """Return the state to read a batch from, and its mask.

        With `state_passing`, a share of the rows, drawn by batch and row, begins with the state after the same row of
        the previous batch, and no document starts there.
        """
        share = self.recipe.training.state_passing
        if self.carried is None or not share:
            return self.carried, mask
        first = self.global_rank * len(tokens)
        passed = torch.tensor(
            [draw(self.recipe.seed, PASSED, number, first + row) < share * 2**64 for row in range(len(tokens))],
            device=tokens.device,
        )
        mask = mask.clone()
        mask[:, 0] &= ~passed
        return where_state(passed, self.carried, self.model.init_state(len(tokens))), mask

    def _choose_kernels(self, model: LanguageModel, work: Work, known: KernelChoice | None = None) -> Decision:
        """Set the kernels that rank 0 chooses for all ranks."""
        strategy = self.trainer.strategy
        own = choose_kernels(model, work, strategy.root_device, known) if self.trainer.is_global_zero else None
        decision = strategy.broadcast(own)
        assert decision is not None
        model.use_kernels(decision.choice.names)
        return decision

    def _seed(self, number: int) -> None:
        """Seed dropout, the only random draw of a forward pass, by the batch, so that a resumed run repeats it."""
        if self.recipe.model.dropout:
            torch.manual_seed(hash((self.recipe.seed, number, self.global_rank)) % 2**63)

    def _diverged(self, what: str) -> str:
        return (
            f"step {self.step + 1}: {what}. The weights are those of step {self.step}. "
            "Lower training.learning_rate, or resume from the last checkpoint with --resume auto."
        )


class Loader:
    """The batches of these numbers, for one rank."""

    def __init__(self, batches: TrainingBatches, numbers: range, rank: int, ranks: int):
        self.batches, self.numbers, self.rank, self.ranks = batches, numbers, rank, ranks

    def __len__(self) -> int:  # without a length, Lightning would prefetch a batch
        return len(self.numbers)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for number in self.numbers:
            yield batch_tensors(self.batches.batch(number, self.rank, self.ranks))
