"""Hold all ways to read a text with a model against each other: their logits, and the state after.

The truth is a forward pass of all tokens at once in float64. How far another way in float32 may be from it is measured
for each model and text, by the same pass with every result rounded to float32 at random; in float64 it is as much less
as its last bit is. Quantized weights are compared with the same quantized weights in float64.

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
from model.stochastic_rounding import StochasticRounding
from model.ways import Outcome, Text, Way, at_once, by_document, draw_parts, draw_text, read, token_by_token
from models import stirred
from torch import Tensor

from lmlong.attention.base import state_tensors
from lmlong.data.tokenizer import ByteTokenizer
from lmlong.errors import RecipeError
from lmlong.inference import state_file
from lmlong.inference.session import prefill
from lmlong.model.build import build
from lmlong.model.decode.fast_step import make_fast_step, no_fast_step
from lmlong.model.language_model import LanguageModel
from lmlong.recipe import Recipe
from lmlong.recipe.reference import reference

SAMPLES, MORE_SAMPLES = 2, 8
"""Passes with rounding at random, of which the largest error counts, and how many more where that seems exceeded: it is
small by chance where one number decides."""

FACTOR, FLOOR = 8.0, 1.0
"""How many times that error is allowed, beside so many roundings of the tensor itself: products of matrices round every
sum on the way, these passes the last alone."""

HOPELESS = 30.0
"""Times what is allowed that no more samples would explain."""

QUANTIZED = {"bfloat16": torch.bfloat16, "int8": torch.int8}
BITS, SMALL = {torch.float32: 24, torch.float64: 53}, 40
"""Bits of each format, and of the passes that measure rounding for float64: errors are in proportion, where those of
float32 may saturate."""


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
    """A text as a model in float64 reads it at once, and how far rounding takes it from that.

    The latter is in units of what the last bit of a format is worth, an error (B,) of each row of each tensor.
    """

    def __init__(self, model: LanguageModel, text: Text):
        self.model, self.text = copy.deepcopy(model).double(), text
        self.truth = named(self.model, read(self.model, text, at_once))
        self.norms = {name: errors(x, torch.zeros_like(x)) for name, x in self.truth.items()}
        self.rounding = self._rounding(at_once, range(SAMPLES), BITS[torch.float32])

    def compare(self, findings: Findings, name: str, way: Way, found: Outcome) -> None:
        """Add what was found in a way of reading to the findings."""
        tensors, bits = named(self.model, found), BITS[found.logits.dtype]
        assert found.state is None or tensors.keys() == self.truth.keys(), name
        off = {tensor: errors(x, self.truth[tensor]) * 2.0**bits for tensor, x in tensors.items()}
        times = self._times(off, self.rounding)
        for each in (at_once, way):
            if 1 < max(float(x.max()) for x in times.values()) < HOPELESS:
                more = self._times(off, self._rounding(each, range(SAMPLES, SAMPLES + MORE_SAMPLES), min(bits, SMALL)))
                times = {tensor: torch.minimum(x, more[tensor]) for tensor, x in times.items()}
        for tensor, of_rows in times.items():
            findings.add(name, tensor, of_rows)

    def _times(self, off: dict[str, Tensor], rounding: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return errors (B,) as multiples of what is allowed."""
        allowed = {name: FACTOR * rounding[name] + FLOOR * self.norms[name] for name in off}
        return {name: torch.where(x > 0, x / allowed[name], 0).nan_to_num(torch.inf) for name, x in off.items()}

    def _rounding(self, way: Way, seeds: range, bits: int) -> dict[str, Tensor]:
        """Return the largest errors of a way with results rounded at random, beside the same way in float64."""
        exact = self.truth if way is at_once else named(self.model, read(self.model, self.text, way))
        largest = {name: torch.zeros_like(norm) for name, norm in self.norms.items()}
        for seed in seeds:
            with StochasticRounding(bits, seed):
                rounded = named(self.model, read(self.model, self.text, way))
            for name, x in rounded.items():
                largest[name] = torch.maximum(largest[name], errors(x, exact[name]) * 2.0**bits)
        return largest


def fuzz(drawn: Drawn) -> Findings:
    """Load a recipe, and read a random text with its model in all ways."""
    findings = Findings()
    try:
        recipe = drawn.load()
    except RecipeError as error:
        known = {option.key for option in reference()}
        for mistake in error.mistakes:
            key = re.sub(r"\.\d+", "", mistake.split(": ")[1])
            findings.refused.append(key)
            if key not in known or not drawn.careless:
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
    findings.native = no_fast_step(model) is None
    if draw.random() < 0.3:
        model.set_state_dtype(torch.float64)

    exact = Exact(model, text)
    for name, way in plans.items():
        exact.compare(findings, f"{name} in float64", way, read(exact.model, text, way))
    exact.compare(findings, "documents alone in float64", by_document, read(exact.model, text, by_document))
    exact.compare(findings, "at once in float32", at_once, read(model, text, at_once))
    compare_steps(findings, exact, model, plans, "float32")

    quantized = draw.choice(list(QUANTIZED))
    model.quantize(QUANTIZED[quantized])
    exact = Exact(model, text)
    exact.compare(findings, f"at once in {quantized}", at_once, read(model, text, at_once))
    compare_steps(findings, exact, model, plans, quantized)
    compare_state_file(findings, model, text)


def compare_steps(findings: Findings, exact: Exact, model: LanguageModel, plans: dict[str, Way], weights: str) -> None:
    """Read with steps by torch, and by native code if there is any for the model."""
    steps = {"torch": model} | ({"native code": with_native_step(model)} if findings.native else {})
    for step, stepping in steps.items():
        for name, way in plans.items():
            exact.compare(findings, f"{name} by {step} in {weights}", way, read(stepping, exact.text, way))


def with_native_step(model: LanguageModel) -> LanguageModel:
    other = copy.deepcopy(model)
    other.fast_step = make_fast_step(other)
    return other


def draw_model(number: int, draw: Random, recipe: Recipe) -> LanguageModel:
    """Return a model for inference with random weights, also where those of a fresh one are 0 or 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)  # of random features
        model = build(recipe, draw.randint(2, 67))
    assert isinstance(model, LanguageModel)
    return stirred(model, draw.choice((0.05, 0.2, 0.5, 1.0)), number).eval()


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
    add("state", outcome.state)
    return found


def compare_state_file(findings: Findings, model: LanguageModel, text: Text) -> None:
    """Save the session of a row and load it again, which must change no bit."""
    tokenizer = ByteTokenizer()
    session = prefill(model, [text.tokens[0].tolist()])
    belongs = state_file.owners(model, tokenizer, "")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "session.state"
        state_file.save(path, session, belongs, tokenizer, "run")
        again = state_file.load(path, model, belongs, "run")
    for mine, other in zip(state_tensors(again), state_tensors(session), strict=True):
        if mine.dtype != other.dtype or not torch.equal(mine, other):
            findings.complaints.append("state file: a tensor is not what was saved")
