"""Compare all ways to read a text with a model: their logits, and the state after.

The truth is a forward pass of all tokens at once in float64. How far rounding may take another way from it is measured
for each model and text, by torch in float32 and by float64 with weights that are a little off. Quantized weights are
compared with the same quantized weights in float64.

B batch.
"""

import copy
import re
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import torch
from model.recipe_draws import Drawn
from model.ways import Outcome, Text, Way, at_once, by_document, draw_parts, draw_text, read, token_by_token
from models import stirred
from torch import Tensor, nn

from lmlong.attention.base import state_tensors
from lmlong.checkpoint.owners import owners
from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.decode.choice import fast_engine, why_no_fast_engine
from lmlong.errors import RecipeError
from lmlong.inference import state_file
from lmlong.inference.session import prefill
from lmlong.model.base import quantize, round_weights
from lmlong.model.build import build
from lmlong.model.language_model import LanguageModel
from lmlong.model.layers import GroupedLinear, rounded_weight
from lmlong.model.quantization import WeightFormat
from lmlong.recipe import Recipe
from lmlong.recipe.file import recipe_class
from lmlong.recipe.reference import reference

FACTOR = 10.0
"""How many times the error of torch's float32, or the effect of weights that are a little off, another way may be off.
In most recipes errors are about as large as these."""

NOISY = 3
"""How often the float64 model is also read with weights that are off by as much as a rounding to float32. A tensor may
be one number, such as the key of one block in a head of one channel. If layers before it amplify rounding, torch's
error in float32 is 1 last bit or 20, by chance, and so is the effect of such weights."""

TILE = 16
"""Tokens after which native code adds to the sums of a state. Each addition may be off by half a last bit in the same
direction, and a last bit of a tensor is allowed beside."""

MOVED = 0.1
"""How far two ways may be apart, relative to the norm, if activations are rounded to int8: float32 rounding moves some
to the next integer."""

QUANTIZED: tuple[WeightFormat, ...] = ("bf16", "int8", "int4")
BITS = {torch.float32: 24, torch.float64: 53}


class Findings:
    """All that was found with one recipe."""

    def __init__(self) -> None:
        self.refused: list[str] = []  # the keys of its mistakes
        self.native = False  # whether there is native code for its model
        self.ways: dict[str, float] = {}  # each with its largest error, as a multiple of what is allowed
        self.complaints: list[str] = []

    def add(self, way: str, tensor: str, times: Tensor) -> None:
        """Add the errors (B,) of a tensor that a way has left, as multiples of what is allowed."""
        self.ways[way] = max(self.ways.get(way, 0.0), float(times.max()))
        for row in (times > 1).nonzero().flatten().tolist():
            self.complaints.append(f"{way}: {tensor} of row {row} is off by {times[row]:.3g} times what is allowed")


class Exact:
    """A text as a model in float64 reads it at once, and how far torch's float32 gets from that."""

    def __init__(self, model: LanguageModel, text: Text, plans: dict[str, Way]):
        self.text, self.model = text, copy.deepcopy(model).double()
        self.truth = named(self.model, read(self.model, text, at_once))
        self.norms = {name: errors(x, torch.zeros_like(x)) for name, x in self.truth.items()}
        self.rounding = {name: torch.zeros_like(norm) for name, norm in self.norms.items()}
        by_torch = copy.deepcopy(model)
        by_torch.use_kernel("torch")
        by_torch.set_state_dtype(torch.float32)  # float64 sums would hide what rounding does to them
        measured = [self._errors(by_torch, way) for way in (at_once, *plans.values())]
        bits = BITS[torch.float64] - BITS[torch.float32]
        for seed in range(NOISY):
            off_by_noise = self._errors(with_noise(self.model, seed), at_once)
            measured.append({name: off * 2.0**-bits for name, off in off_by_noise.items()})
        for name, off in ((name, off) for errors in measured for name, off in errors.items()):
            self.rounding[name] = torch.maximum(self.rounding[name], off)

    def compare(self, findings: Findings, name: str, way: Way, model: LanguageModel) -> None:
        """Read in a way with a model of the same weights, and add what is off to the findings."""
        floor = 1 + self.text.tokens.shape[1] / TILE / 2
        if any(isinstance(module, GroupedLinear) for module in model.modules()):
            floor += MOVED * 2.0 ** BITS[torch.float32]
        for tensor, off in self._errors(model, way).items():
            times = off / (FACTOR * self.rounding[tensor] + floor * self.norms[tensor])
            findings.add(name, tensor, torch.where(off > 0, times, 0).nan_to_num(torch.inf))

    def _errors(self, model: LanguageModel, way: Way) -> dict[str, Tensor]:
        """Return the error of each row (B,) of each tensor, in units of the last bit of its format."""
        outcome = read(model, self.text, way)
        tensors, unit = named(model, outcome), 2.0 ** -BITS[outcome.logits.dtype]
        assert outcome.state is None or tensors.keys() == self.truth.keys()
        return {name: errors(x, self.truth[name]) / unit for name, x in tensors.items()}


def with_noise(model: LanguageModel, seed: int) -> LanguageModel:
    """Return a float64 model with each weight off by as much as a rounding to float32."""
    draw, noisy = torch.Generator().manual_seed(seed), copy.deepcopy(model)
    with torch.no_grad():
        for weight in noisy.parameters():
            noise = 2 * torch.rand(weight.shape, generator=draw, dtype=weight.dtype) - 1
            weight.mul_(1 + noise * 2.0 ** -BITS[torch.float32])
    return noisy


def fuzz(drawn: Drawn) -> Findings:
    """Load a recipe, and read a random text with its model in all ways."""
    findings = Findings()
    try:
        recipe = drawn.load()
    except RecipeError as error:
        known = {option.key for option in reference(recipe_class())}
        for mistake in error.mistakes:
            keys = {
                re.sub(r"\.\d+", index, mistake.split(": ")[1]) for index in ("", ".N")
            }  # of a list, or of sections
            findings.refused.append(min(keys))
            if not keys & known or not drawn.careless:
                findings.complaints.append(f"refused: {mistake}")
        return findings
    compare_ways(findings, recipe, drawn.number)
    return findings


def compare_ways(findings: Findings, recipe: Recipe, number: int) -> None:
    """Read a random text in all ways with a model of a recipe; a number stands for the same text and weights."""
    draw = Random(f"agreement {number}")
    model = draw_model(number, draw, recipe)
    text = draw_text(draw, model.embedding.num_embeddings, recipe.model.factor)
    plans = {"token by token": token_by_token(model, text), "in parts": draw_parts(draw, model, text)}
    findings.native = why_no_fast_engine(model) is None
    if draw.random() < 0.3:
        model.set_state_dtype(torch.float64)

    exact = Exact(model, text, plans)
    for name, way in {**plans, "documents alone": by_document}.items():
        exact.compare(findings, f"{name} in float64", way, exact.model)
    compare_at_once_and_steps(findings, exact, model, plans, "float32")
    quantized = draw.choice(QUANTIZED)
    before = copy.deepcopy(model)
    quantize(model, quantized)
    if quantized != "bf16":
        compare_rounding(findings, before, model, quantized)
    compare_at_once_and_steps(findings, Exact(model, text, plans), model, plans, quantized)
    compare_state_file(findings, model, text)


def compare_rounding(findings: Findings, trained: LanguageModel, loaded: LanguageModel, weights: Any) -> None:
    """Training for quantized decoding computes with the matrices of the quantized model, to the bit."""
    round_weights(trained, weights)
    for name, module in trained.named_modules():
        if isinstance(module, nn.Linear):
            stored, rounding = loaded.get_submodule(name).dequantized(torch.float32), getattr(module, "rounding", None)
            if not torch.equal(stored, rounded_weight(module.weight, rounding)):
                findings.complaints.append(f"{name} is rounded to other values in training than by {weights}")
    if not torch.equal(trained.lm_head.matrix(torch.float32), loaded.lm_head.matrix(torch.float32)):
        findings.complaints.append(f"the output matrix is rounded to other values in training than by {weights}")


def compare_at_once_and_steps(
    findings: Findings, exact: Exact, model: LanguageModel, plans: dict[str, Way], weights: str
) -> None:
    """Read at once, and in ways with steps by torch, and by native code where there is any for the model."""
    exact.compare(findings, f"at once in {weights}", at_once, model)
    steps = {"torch": model} | ({"native code": with_native_step(model)} if findings.native else {})
    for step, stepping in steps.items():
        for name, way in plans.items():
            exact.compare(findings, f"{name} by {step} in {weights}", way, stepping)


def with_native_step(model: LanguageModel) -> LanguageModel:
    other = copy.deepcopy(model)
    other.engine = fast_engine(other)
    return other


def draw_model(number: int, draw: Random, recipe: Recipe) -> LanguageModel:
    """Return a model for inference with random weights, also where those of a fresh one are 0 or 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)  # of random features
        model = build(recipe, draw.randint(2, 67))
    assert isinstance(model, LanguageModel)
    return stirred(model, draw.choice((0.01, 0.05, 0.2, 0.5, 1.0)), number).eval()


def errors(x: Tensor, truth: Tensor) -> Tensor:
    """Return the norm of the difference of each row (B,); infinite where shapes differ or anything is not finite."""
    if x.shape != truth.shape:
        return torch.full((len(truth),), torch.inf, dtype=torch.float64)
    difference = (x.double() - truth.double()).reshape(len(truth), -1).norm(dim=1)
    return difference.nan_to_num(torch.inf)


def named(model: LanguageModel, outcome: Outcome) -> dict[str, Tensor]:
    """Return the tensors of an outcome by their paths, without those of states that grow."""
    found: dict[str, Tensor] = {}

    def add(name: str, part: Any) -> None:
        if isinstance(part, Tensor):
            found[name] = part
        elif part is not None and name not in growing:
            for key, inner in zip(getattr(part, "_fields", range(len(part))), part, strict=True):
                add(f"{name}.{key}", inner)

    growing = {
        f"state.blocks.{layer}.attention"
        for layer, attention in enumerate(model.attentions)
        if attention.state_growth != "constant"
    }
    add("logits", outcome.logits)
    add("state", model.settle(outcome.state) if outcome.state else None)
    return found


def compare_state_file(findings: Findings, model: LanguageModel, text: Text) -> None:
    """Save the session of a row and load it again, which must change no bit."""
    tokenizer = ByteTokenizer()
    session = prefill(model, [text.tokens[0].tolist()])
    belongs = owners(model, tokenizer, "")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "session.state"
        state_file.save(path, session, model, belongs, tokenizer, "run")
        again = state_file.load(path, model, belongs, tokenizer, "run")
    for mine, other in zip(state_tensors(again), state_tensors(session), strict=True):
        if mine.dtype != other.dtype or not torch.equal(mine, other):
            findings.complaints.append("state file: a tensor is not what was saved")
