"""A step of training and of serving: the only code here that imports modules which may move.

B batch, T time.
"""

from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from lmlong import LanguageModel, Recipe

VOCABULARY = 258
"""Tokens of the tokenizer of kind bytes."""

ROWS, LATER = 2, 37
"""Rows of a batch, and the tokens of a second piece of it, read from the state after the first."""


def new_model(recipe: Recipe) -> Any:
    """Return a model of a recipe by its seed, every weight of which has an effect."""
    from lmlong.model.build import build

    torch.manual_seed(recipe.seed)
    model = build(recipe, VOCABULARY)
    disturb(model)
    if isinstance(model, LanguageModel):
        model.use_kernel(recipe.training.kernel)
    return model


@torch.no_grad()
def disturb(model: nn.Module) -> None:
    """Add noise to each weight, drawn by its name: a new model multiplies much of what it computes by 0."""
    for name, weight in model.named_parameters():
        draw = torch.Generator().manual_seed(int(sha256(name.encode()).hexdigest()[:8], 16))
        weight.add_(torch.randn(weight.shape, generator=draw), alpha=0.1)


def gradients(recipe: Recipe, marked: bool) -> dict[str, Any]:
    """Return the loss of a batch, the state after it, and the gradients of all weights; `marked` batches have document
    starts, or padding for an encoder."""
    from lmlong.model.segments import text_loss

    model = new_model(recipe).train()
    length, causal = recipe.text.sequence_length, recipe.objective == "causal"
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(32, 64, (ROWS, length + LATER + 1), generator=draw)
    starts = torch.rand(ROWS, length + LATER, generator=draw) < 0.05
    spans = (slice(0, length), slice(length, length + LATER)) if causal else (slice(0, length),)
    total, state = torch.zeros(()), None
    torch.manual_seed(2)  # of dropout
    with torch.autocast("cpu", torch.bfloat16, enabled=recipe.training.precision == "bf16"):
        for span in spans:
            inputs, targets = tokens[:, :-1][:, span], tokens[:, 1:][:, span]
            masked = mask(starts[:, span], marked, causal)
            loss, state = text_loss(model, inputs, targets, masked, state, recipe.training.segment)
            total = total + loss
    total.backward()
    found = {name: weight.grad for name, weight in model.named_parameters()}
    return {"loss": total.detach(), "state": list(tensors(state)), "gradients": found}


def mask(starts: Tensor, marked: bool, causal: bool) -> Tensor | None:
    """Return document starts (B, T), or which of the last tokens are padding."""
    if not marked:
        return None
    return starts if causal else (torch.arange(starts.shape[1]) >= starts.shape[1] - 9).expand_as(starts)


def tensors(state: Any) -> Iterator[Tensor]:
    """Iterate over the tensors in nested tuples."""
    if isinstance(state, Tensor):
        yield state.detach()
    elif state is not None:
        for part in state:
            yield from tensors(part)


@torch.inference_mode()
def served(model: LanguageModel, state: Any, steps: Tensor) -> dict[str, Any]:
    """Return what the steps of a server give: the logits after tokens (T, B) of rows admitted with the states of a
    batch, and the state of each row after the last."""
    from lmlong.decode.engine import engine_of, rows_of

    engine = engine_of(model)
    rows = rows_of(engine, state)
    logits = [engine.step(rows, tokens.tolist()).clone() for tokens in steps]
    states = [list(tensors(model.settle(engine.save(row)))) for row in rows]
    return {"logits": torch.stack(logits), "states": states}
