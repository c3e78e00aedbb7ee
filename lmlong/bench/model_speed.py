"""The speed of whole models in training and generation: a recipe's model with one attention after another."""

import copy
from functools import lru_cache

import torch
from torch import Tensor

from lmlong import recipe
from lmlong.bench.speed import Candidate
from lmlong.bench.speed_grid import attentions
from lmlong.inference.session import Session, append_token, next_logits, prefill
from lmlong.model.fast_step import make_fast_step, why_no_fast_step
from lmlong.model.language_model import LanguageModel
from lmlong.model.state import state_bytes
from lmlong.training.optimizer import make_optimizer
from lmlong.training.prepare import check_kernel, set_kernel

GENERATED = 16
"""Tokens generated in one pass."""


def build_model(name: str, options: recipe.Recipe, device: torch.device) -> LanguageModel:
    """Return the recipe's model with another attention in all layers, with random weights, by the recipe's kernel."""
    check_kernel(options.training.kernel, device)
    changes: dict[str, object] = dict(attentions()[name])
    attention = options.model.attention.model_copy(update=changes)
    torch.manual_seed(options.seed)
    model = LanguageModel(
        options.model.model_copy(update={"attention": attention}),
        options.text.tokenizer.most_tokens,
        options.training.activation_checkpointing,
    )
    set_kernel(model, options.training.kernel)
    return model.to(device)


def training_candidate(
    name: str, precision: str, length: int, options: recipe.Recipe, device: torch.device
) -> Candidate:
    """Return a whole training step on one row of random tokens: forward, backward, clipping, the optimizer. It returns
    the loss and the norm of the gradient."""
    model = build_model(name, options, device)
    optimizer = make_optimizer(model, options.training)
    tokens = torch.randint(model.embedding.num_embeddings, (1, length + 1), device=device)
    dtype = {"bf16": torch.bfloat16, "16": torch.float16}.get(precision)
    segment = options.training.segment if model.constant_state else None

    def step() -> Tensor:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            nll, _ = model.loss(tokens[:, :-1], tokens[:, 1:], segment=segment)
        loss = nll / length
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.training.clip)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack([loss.detach(), norm])

    return Candidate(step, length, 0, 0, growth=1 if model.constant_state else 2)


class GenerationCandidates:
    """Candidates that generate text; each model is built and compiled once, for all lengths of the text before."""

    def __init__(self, options: recipe.Recipe, device: torch.device, compiled: bool):
        self.options, self.device, self.compiled = options, device, compiled
        self.model = lru_cache(maxsize=None)(self._model)

    def candidate(self, name: str, precision: str, length: int) -> Candidate:
        """Return the generation of some tokens after a text of a length, which is read before."""
        model = self.model(name, precision)
        text = torch.randint(model.embedding.num_embeddings, (length,)).tolist()
        memory: list[Session] = [prefill(model, [text])]

        def generate() -> None:
            now = memory[0]
            for _ in range(GENERATED):
                logits, state = next_logits(model, now)
                now = append_token(now, state, logits.argmax(-1))

        generate()  # a graph is made at its first use
        return Candidate(generate, GENERATED, state_bytes(memory[0].state), 0, growth=0, measured=False)

    def _model(self, name: str, precision: str) -> LanguageModel:
        model = copy.deepcopy(build_model(name, self.options, self.device)).eval()
        if precision != "32":
            model.quantize({"bf16": torch.bfloat16, "int8": torch.int8}[precision])
        if self.compiled and why_no_fast_step(model) is None:
            model.fast_step = make_fast_step(model)
        return model
