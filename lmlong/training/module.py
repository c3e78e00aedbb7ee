"""One training step, for Lightning: loss of a batch, a clipped gradient, AdamW."""

import math
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lmlong.attention.contract import tensors
from lmlong.errors import CheckpointError, DivergedError
from lmlong.model.loss import IGNORED
from lmlong.model.scoring import Totals, count_bytes
from lmlong.model.states import alike, detached, rebuilt
from lmlong.model.text_model import TextModel
from lmlong.recipe import Recipe
from lmlong.training.optimizer import make_optimizer, rate
from lmlong.training.ranks import gathered, own
from lmlong.training.state import loops_at


class Learner(LightningModule):
    """A model and how it learns; what a step lost is kept as totals for whoever reports it."""

    token_bytes: Tensor

    def __init__(self, model: TextModel, recipe: Recipe, steps: int, token_bytes: Tensor):
        super().__init__()
        self.model = model
        self.recipe = recipe
        self.steps = steps
        self.register_buffer("token_bytes", token_bytes, persistent=False)
        self.step_totals = Totals()  # of the optimizer step under way
        self.gradient_norm = math.nan
        self.skipped = 0  # steps left out in a row, up to now
        self.carried: Any = None  # the state of the batch before; its tensors alone when they come from a checkpoint

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets, marks = batch
        self._seed(batch_idx)
        with self.trainer.precision_plugin.forward_context():
            nats, state = self.model.lose(tokens, targets, marks, self.recipe.training.segment, self._carried(tokens))
        if self.recipe.training.carry_state:
            self.carried = detached(state)
        lost = float(nats.detach())
        # among several ranks the gradient tells, which all of them see: one that stopped alone would hang the others
        alone = self.trainer.world_size == 1
        if not math.isfinite(lost) and alone and self.recipe.training.on_nonfinite == "stop":
            raise DivergedError(self._diverged(f"the loss of batch {batch_idx} is {lost}"))
        self.step_totals += Totals(lost, int((targets != IGNORED).sum()), count_bytes(targets, self.token_bytes))
        # divided by a constant, so that batches, ranks and accumulated parts add up to the same gradient
        return nats / (len(targets) * self.recipe.targets_per_sequence)

    def configure_optimizers(self) -> Any:
        return make_optimizer(self.model, self.recipe.training)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Set the learning rate, which follows from the step alone."""
        options = self.recipe.training
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = options.learning_rate * rate(self.global_step, self.steps, options)

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.training.clip)
        if not self.accept(float(norm)):
            for weight in self.model.parameters():
                weight.grad = None  # without one AdamW leaves a weight, and what it knows of it, alone

    def accept(self, norm: float) -> bool:
        """Whether a gradient of this norm is fit to move the weights: one that is not finite, as of any loss that is
        not, must not reach them."""
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
        checkpoint["carried"] = [gathered(self.trainer, tensor) for tensor in tensors(self.carried)]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        fresh = self.trainer.fit_loop.state_dict()
        checkpoint["loops"] = {"fit_loop": loops_at(fresh, checkpoint["global_step"], self.recipe.training.accumulate)}
        options = make_optimizer(self.model, self.recipe.training).state_dict()["param_groups"]
        checkpoint["optimizer_states"][0]["param_groups"] = options
        self.skipped = checkpoint["skipped"]
        self.carried = [own(self.trainer, tensor) for tensor in checkpoint["carried"]] or None

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The weights of the model alone, under the names the model itself gives them."""
        return self.model.state_dict()

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return self.model.load_state_dict(state_dict)

    def _carried(self, tokens: Tensor) -> Any:
        """The state that the batch before left, where the recipe has it go on."""
        if isinstance(self.carried, list):
            state = self.model.init_state(len(tokens))
            if not alike(self.carried, list(tensors(state))):
                raise CheckpointError("the states carried by the checkpoint are not of this model. Use another one.")
            self.carried = rebuilt(state, iter([tensor.to(tokens.device) for tensor in self.carried]))
        return self.carried

    def _seed(self, batch_idx: int) -> None:
        """Dropout is the only draw of a forward pass: seeded by the batch, it is the same after a resume."""
        if self.recipe.model.dropout:
            torch.manual_seed(hash((self.recipe.seed, batch_idx, self.global_rank)) % 2**63)

    def _diverged(self, what: str) -> str:
        return (
            f"step {self.global_step + 1}: {what}. The weights are those of step {self.global_step}. "
            "Lower training.learning_rate, or go on from the last checkpoint with --resume auto."
        )
