"""One training step, for Lightning: loss of a batch, a clipped gradient, the optimizer."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lmlong.attention.base import state_tensors
from lmlong.attention.state_check import StateError
from lmlong.data.batches import Arrays, TrainingBatches
from lmlong.data.shuffle import draw
from lmlong.errors import CheckpointError, DivergedError
from lmlong.model.base import TextModel
from lmlong.model.loss import IGNORED
from lmlong.model.metrics import LossTotals, count_bytes
from lmlong.model.state import detach_state, rebuild_state, where_state
from lmlong.recipe import Recipe
from lmlong.training.clock import TrainingClock
from lmlong.training.distributed import all_gather, rank_slice
from lmlong.training.optimizer import ENDLESS, learning_rate_factor, make_optimizer
from lmlong.training.state import loops_at
from lmlong.training.teacher import Teacher, taught_loss

PASSED = 1
"""Part of the key of the draws that choose the rows of `state_passing`."""


class TrainingModule(LightningModule):
    """The Lightning module of a run; the loss of a step is kept as totals for the callbacks."""

    token_bytes: Tensor

    def __init__(
        self,
        model: TextModel,
        recipe: Recipe,
        clock: TrainingClock,
        token_bytes: Tensor,
        batches: TrainingBatches,
        teacher: Teacher | None = None,
    ):
        super().__init__()
        self.model = model
        self.recipe = recipe
        self.clock, self.batches, self.teacher = clock, batches, teacher
        self.register_buffer("token_bytes", token_bytes, persistent=False)
        self.step_totals = LossTotals()  # of the current optimizer step
        self.learning_rate = math.nan  # of the current optimizer step
        self.gradient_norm = math.nan
        self.skipped = 0  # steps skipped in a row so far
        self.carried: Any = None  # the state after the batch before; only its tensors when they come from a checkpoint

    def on_fit_start(self) -> None:
        if self.teacher:
            self.teacher.model.to(self.device)  # of each process

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets, mask = batch
        self._seed(batch_idx)
        state, mask = self._initial_state(tokens, mask, batch_idx)
        with self.trainer.precision_plugin.forward_context():
            segment = self.recipe.training.segment
            learned, nll, state = taught_loss(self.model, self.teacher, tokens, targets, mask, state, segment)
        if self.recipe.training.passes_states:
            self.carried = detach_state(state)
        loss = float(learned.detach())
        # several ranks check the gradient, which all of them see: one that stopped alone would hang the others
        alone = self.trainer.world_size == 1
        if not math.isfinite(loss) and alone and self.recipe.training.on_nonfinite == "stop":
            raise DivergedError(self._diverged(f"the loss of batch {batch_idx} is {loss}"))
        self.step_totals += LossTotals(
            float(nll), int((targets != IGNORED).sum()), count_bytes(targets, self.token_bytes)
        )
        # divided by a constant, so that batches, ranks and accumulated parts add up to the same gradient
        return learned / (len(targets) * self.recipe.targets_per_sequence)

    def train_dataloader(self) -> "Loader":
        """Return the batches from the run's current step on."""
        first = self.global_step * self.recipe.training.accumulate
        return Loader(self.batches, first, self.trainer.global_rank, self.trainer.world_size)

    def configure_optimizers(self) -> Any:
        return make_optimizer(self.model, self.recipe.training)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Set the learning rate, which depends on the step, and on the time trained where that ends the run."""
        options, step = self.recipe.training, self.global_step
        factor = learning_rate_factor(step, self.clock.expected_steps(step), options)
        self.learning_rate = options.learning_rate * factor
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = self.learning_rate * group["lr_scale"]

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.training.clip)
        if not self.accept(float(norm)):
            for weight in self.model.parameters():
                weight.grad = None  # without one the optimizer updates neither a weight nor its state

    def accept(self, norm: float) -> bool:
        """Return whether a gradient of this norm may update the weights: one that is not finite, as of any loss that is
        not, must not."""
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
        self.carried = None  # it may hold what is not finite
        return False

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["skipped"] = self.skipped
        checkpoint["seconds"] = self.clock.seconds
        checkpoint["carried"] = [all_gather(self.trainer, tensor) for tensor in state_tensors(self.carried)]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        fresh = self.trainer.fit_loop.state_dict()
        checkpoint["loops"] = {"fit_loop": loops_at(fresh, checkpoint["global_step"], self.recipe.training.accumulate)}
        options = make_optimizer(self.model, self.recipe.training).state_dict()["param_groups"]
        checkpoint["optimizer_states"][0]["param_groups"] = options
        self.skipped = checkpoint["skipped"]
        self.clock.seconds = checkpoint["seconds"]
        self.carried = [rank_slice(self.trainer, tensor) for tensor in checkpoint["carried"]] or None

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the weights of the model alone, under the model's own names."""
        return self.model.state_dict()

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return self.model.load_state_dict(state_dict)

    def _initial_state(self, tokens: Tensor, mask: Tensor, batch_idx: int) -> tuple[Any, Tensor]:
        """Return the state to read a batch from, and its mask: with `state_passing` a share of the rows, drawn by batch
        and row, begins with the state after the same row of the batch before, where no document starts."""
        carried, share = self._carried(tokens), self.recipe.training.state_passing
        if carried is None or not share:
            return carried, mask
        first = self.global_rank * len(tokens)
        passed = torch.tensor(
            [draw(self.recipe.seed, PASSED, batch_idx, first + row) < share * 2**64 for row in range(len(tokens))],
            device=tokens.device,
        )
        mask = mask.clone()
        mask[:, 0] &= ~passed
        return where_state(passed, carried, self.model.init_state(len(tokens))), mask

    def _carried(self, tokens: Tensor) -> Any:
        """Return the state after the batch before, where the recipe passes it on."""
        if isinstance(self.carried, list):
            empty = self.model.init_state(len(tokens))
            try:
                if len(self.carried) != len(list(state_tensors(empty))):
                    raise StateError("another number of tensors")
                carried = rebuild_state(empty, iter([tensor.to(tokens.device) for tensor in self.carried]))
                self.model.check_state(carried, empty)
            except StateError as error:
                raise CheckpointError(f"the carried states are not of this model ({error}). Use another one.") from None
            self.carried = carried
        return self.carried

    def _seed(self, batch_idx: int) -> None:
        """Seed dropout, the only draw of a forward pass, by the batch, so that it is the same after a resume."""
        if self.recipe.model.dropout:
            torch.manual_seed(hash((self.recipe.seed, batch_idx, self.global_rank)) % 2**63)

    def _diverged(self, what: str) -> str:
        return (
            f"step {self.global_step + 1}: {what}. The weights are those of step {self.global_step}. "
            "Lower training.learning_rate, or go on from the last checkpoint with --resume auto."
        )


class Loader:
    """Endless batches from `first` on."""

    def __init__(self, batches: TrainingBatches, first: int, rank: int, ranks: int):
        self.batches, self.first, self.rank, self.ranks = batches, first, rank, ranks

    def __len__(self) -> int:
        return ENDLESS  # Lightning needs a length in order not to prefetch a batch, which a resume would miss

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for number in range(self.first, ENDLESS):
            yield as_tensors(self.batches.batch(number, self.rank, self.ranks))


def as_tensors(batch: Arrays) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, targets and mask as tensors that share the arrays' memory."""
    tokens, targets, mask = map(torch.from_numpy, batch)
    return tokens, targets, mask
