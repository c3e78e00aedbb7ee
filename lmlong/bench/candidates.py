"""The candidates of the speed benchmarks: attentions alone, and whole models in training and generation.

B batch, H heads, T time.
"""

import copy
import sys
from functools import lru_cache
from typing import cast, get_args

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lmlong import recipe
from lmlong.attention.base import CausalAttention
from lmlong.attention.device_policy import policy_of
from lmlong.attention.inputs import draw_inputs
from lmlong.attention.registry import CAUSAL
from lmlong.bench.speed import Candidate
from lmlong.decode.choice import fast_engine, why_no_fast_engine
from lmlong.inference.loading import CACHE_DTYPE
from lmlong.inference.session import Session, greedy, prefill
from lmlong.model.base import quantize
from lmlong.model.device import autocast
from lmlong.model.kernel_check import checked_kernels
from lmlong.model.language_model import LanguageModel
from lmlong.model.quantization import WeightFormat
from lmlong.model.segments import text_loss
from lmlong.model.state import state_bytes
from lmlong.recipe.kinds import candidates
from lmlong.training.optimizer import LoopOptimizer
from lmlong.training.prepare import check_kernel

FORMATS = {"32": torch.float32, "bf16": torch.bfloat16, "64": torch.float64}


def attention_candidate(
    name: str, precision: str, length: int, heads: int, width: int, device: torch.device
) -> Candidate:
    """Return passes forward and backward of an attention on random inputs of one length; `softmax` is that of torch.
    `width` is that of a head."""
    torch.manual_seed(0)
    size = (1, heads, length, width)
    q, k, v, grad = (torch.randn(size, dtype=FORMATS[precision], device=device) for _ in range(4))
    attention = build_attention(name, heads, width).to(device)
    drawn = draw_inputs(attention.inputs, 1, length, torch.Generator().manual_seed(0))
    more = {name: x.to(device) for name, x in drawn.items()}
    q, k = (x if attention.has_keys else x[..., :0] for x in (q, k))
    inputs = [x.requires_grad_() for x in (q, k, v, *more.values()) if x.numel() and x.is_floating_point()]

    def attend() -> Tensor:
        if name == "softmax":
            return scaled_dot_product_attention(q, k, v, is_causal=True)
        return attention(q, k, v, attention.init_state(1, device, q.dtype), None, more)[0]

    def work() -> object:
        return torch.autograd.grad(attend(), inputs, grad)

    input_bytes, growth = sum(x.nbytes for x in inputs), 2 if attention.state_growth == "per token" else 1
    return Candidate(work, length, input_bytes + grad.nbytes, 2 * (input_bytes + v.nbytes), growth)


def build_attention(name: str, heads: int, width: int) -> CausalAttention:
    options = recipe.Attention(**candidates()[name])  # type: ignore[arg-type]
    kind = options.kind
    assert isinstance(kind, str)
    return CAUSAL[kind](heads, width, width, options)


GENERATED = 16
"""Tokens that one pass generates."""


def build_model(name: str, options: recipe.Recipe, device: torch.device) -> LanguageModel:
    """Return the recipe's model with another attention in all layers and random weights, with the recipe's kernel."""
    changes: dict[str, object] = dict(candidates()[name])
    attention = options.model.attention.model_copy(update=changes)
    torch.manual_seed(options.seed)
    model = LanguageModel(
        options.model.model_copy(update={"attention": attention}),
        options.text.tokenizer.most_tokens,
        options.training.activation_checkpointing is True,
    )
    check_kernel(options.training.kernel, model, device)
    model.use_kernel(options.training.kernel)
    return model.to(device)


def training_candidate(
    name: str, precision: str, length: int, options: recipe.Recipe, device: torch.device
) -> Candidate:
    """Return a training step on one row of random tokens: forward, backward, clipping, optimizer. It returns the loss
    and the norm of the gradient."""
    model = build_model(name, options, device)
    if options.training.compile:
        model.compile_blocks()
    segment = options.training.segment if model.constant_state else None
    names, refused = checked_kernels(model, precision, True, device)
    model.use_kernels(names)
    for line in refused:
        print(line, file=sys.stderr)
    optimizer = LoopOptimizer(model, options.training, policy_of(device))
    tokens = torch.randint(model.embedding.num_embeddings, (1, length + 1), device=device)

    def step() -> Tensor:
        with autocast(device, precision):
            nll, _ = text_loss(model, tokens[:, :-1], tokens[:, 1:], segment=segment)
        loss = nll / length
        loss.backward()
        return torch.stack([loss.detach(), optimizer.step()])

    return Candidate(step, length, 0, 0, growth=1 if model.constant_state else 2)


class GenerationCandidates:
    """Candidates that generate text; each model is built and compiled once, for all lengths of the prompt."""

    def __init__(self, options: recipe.Recipe, device: torch.device, compiled: bool):
        self.options, self.device, self.compiled = options, device, compiled
        self.model = lru_cache(maxsize=None)(self._model)

    def candidate(self, name: str, precision: str, length: int) -> Candidate:
        """Return the generation of GENERATED tokens after a prompt, which is prefilled here."""
        model = self.model(name, precision)
        prompt = torch.randint(model.embedding.num_embeddings, (length,)).tolist()
        after_prompt = prefill(model, [prompt])

        def generate() -> Session:
            return greedy(model, after_prompt, GENERATED)

        generate()  # captures the graph
        return Candidate(generate, GENERATED, state_bytes(after_prompt.state), 0, growth=0, measured=False)

    def _model(self, name: str, precision: str) -> LanguageModel:
        model = copy.deepcopy(build_model(name, self.options, self.device)).eval()
        model.set_cache_dtype(CACHE_DTYPE)
        if precision != "32":
            assert precision in get_args(WeightFormat)
            quantize(model, cast(WeightFormat, precision))
        if self.compiled and why_no_fast_engine(model) is None:
            model.engine = fast_engine(model)
        return model
