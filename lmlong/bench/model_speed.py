"""How fast whole models learn and write: a recipe's model with one attention after another."""

import copy
from functools import lru_cache

import torch

from lmlong import recipe
from lmlong.bench.contest import Contender
from lmlong.bench.speed_grid import ATTENTIONS
from lmlong.inference.memory import Memory, ask, bytes_of, followed, read
from lmlong.model.compiled import compile_step, obstacle
from lmlong.model.language_model import LanguageModel
from lmlong.training.optimizer import make_optimizer

WRITTEN = 16
"""Tokens that one pass writes."""


def build(name: str, options: recipe.Recipe, device: torch.device) -> LanguageModel:
    """The recipe's model with another attention in all layers, its weights drawn."""
    changes: dict[str, object] = {"kind": "linear", **ATTENTIONS[name]}
    attention = options.model.attention.model_copy(update=changes)
    torch.manual_seed(options.seed)
    model = LanguageModel(
        options.model.model_copy(update={"attention": attention}),
        options.text.tokenizer.vocabulary,
        options.training.activation_checkpointing,
    )
    return model.to(device)


def learner(name: str, precision: str, length: int, options: recipe.Recipe, device: torch.device) -> Contender:
    """A whole training step on one row of drawn tokens: forward, backward, clipping, AdamW."""
    model = build(name, options, device)
    optimizer = make_optimizer(model, options.training)
    tokens = torch.randint(model.embedding.num_embeddings, (1, length + 1), device=device)
    dtype = {"bf16": torch.bfloat16, "16": torch.float16}.get(precision)
    segment = None if name == "softmax" else options.training.segment

    def step() -> None:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            nats, scored = model.loss(tokens[:, :-1], tokens[:, 1:], None, segment)
        (nats / scored).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.training.clip)
        optimizer.step()
        optimizer.zero_grad()

    return Contender(step, length, 0, 0, growth=2 if name == "softmax" else 1)


class Writers:
    """Models that write; each is built and compiled once, whatever the length of the text before."""

    def __init__(self, options: recipe.Recipe, device: torch.device, compiled: bool):
        self.options, self.device, self.compiled = options, device, compiled
        self.model = lru_cache(maxsize=None)(self._model)

    def contender(self, name: str, precision: str, length: int) -> Contender:
        """Some tokens after a text of so many, which is read before."""
        model = self.model(name, precision)
        text = torch.randint(model.embedding.num_embeddings, (length,)).tolist()
        memory: list[Memory] = [read(model, [text])]

        def write() -> None:
            now = memory[0]
            for _ in range(WRITTEN):
                logits, state = ask(model, now)
                now = followed(now, state, logits.argmax(-1))

        write()  # a graph is made at its first use
        return Contender(write, WRITTEN, bytes_of(memory[0].state), 0, growth=0, measured=False)

    def _model(self, name: str, precision: str) -> LanguageModel:
        model = copy.deepcopy(build(name, self.options, self.device)).eval()
        if precision != "32":
            model.round_matrices({"bf16": torch.bfloat16, "int8": torch.int8}[precision])
        if self.compiled and obstacle(model) is None:
            compile_step(model)
        return model
