"""Hold all ways to read a text with a model against each other: their logits, and the state after.

The truth is a forward pass of all tokens at once in float64. How far rounding may take another way from it is measured
for each model and text, by the same pass with every result rounded at random. Quantized weights are compared with the
same quantized weights in float64.

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
from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.errors import RecipeError
from lmlong.inference import state_file
from lmlong.inference.session import prefill
from lmlong.model.build import build
from lmlong.model.fast_step import make_fast_step, why_no_fast_step
from lmlong.model.language_model import LanguageModel
from lmlong.recipe import Recipe
from lmlong.recipe.file import recipe_class
from lmlong.recipe.reference import reference

SAMPLES, MORE_SAMPLES = 2, 4
"""Passes with rounding at random, of which the largest error counts, and how many more where that is exceeded: it is
small by chance where one number decides, and sums over a long text are rounded more often in other ways to read."""

FACTOR = 6.0
"""How many times that error is allowed: products of matrices round every sum on the way, those passes the last alone.
In most recipes errors are about as large as theirs."""

TILE = 16
"""Tokens after which native code adds to the sums of a state. Each addition may be off by half a last bit in the same
direction, and a last bit of a tensor is allowed beside."""

HOPELESS = 30.0
"""Times what is allowed that no more samples would explain."""

QUANTIZED = {"bfloat16": torch.bfloat16, "int8": torch.int8}
BITS = {torch.float32: 24, torch.float64: 53}
FEWER = {torch.float32: 24, torch.float64: 40}
"""Bits of each format, and of the passes that measure what its rounding does: those of float64 itself would round no
more than the truth."""


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
    """A text as a model in float64 reads it at once, and how far rounding takes it from that."""

    def __init__(self, model: LanguageModel, text: Text):
        self.text, narrow = text, copy.deepcopy(model)
        narrow.use_kernel("torch")  # native code would round as it likes
        self.models = {torch.float32: narrow, torch.float64: copy.deepcopy(model).double()}
        self.truth = self._read(torch.float64, at_once)
        self.norms = {name: errors(x, torch.zeros_like(x)) for name, x in self.truth.items()}
        self.rounding: dict[torch.dtype, dict[str, Tensor]] = {}

    def compare(self, findings: Findings, name: str, way: Way, model: LanguageModel) -> None:
        """Read in a way with a model of the same weights, and add what is off to the findings."""
        found = read(model, self.text, way)
        tensors, dtype = named(model, found), found.logits.dtype
        assert found.state is None or tensors.keys() == self.truth.keys(), name
        if dtype not in self.rounding:
            self.rounding[dtype] = self._rounding(dtype, at_once, range(SAMPLES))
        off = {tensor: errors(x, self.truth[tensor]) * 2.0 ** BITS[dtype] for tensor, x in tensors.items()}
        times = self._times(off, self.rounding[dtype])
        for each in (at_once, way):
            if 1 < max(float(x.max()) for x in times.values()) < HOPELESS:
                more = self._times(off, self._rounding(dtype, each, range(SAMPLES, SAMPLES + MORE_SAMPLES)))
                times = {tensor: torch.minimum(x, more[tensor]) for tensor, x in times.items()}
        for tensor, of_rows in times.items():
            findings.add(name, tensor, of_rows)

    def _times(self, off: dict[str, Tensor], rounding: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return errors (B,) as multiples of what is allowed."""
        floor = 1 + self.text.tokens.shape[1] / TILE / 2
        allowed = {name: FACTOR * rounding[name] + floor * self.norms[name] for name in off}
        return {name: torch.where(x > 0, x / allowed[name], 0).nan_to_num(torch.inf) for name, x in off.items()}

    def _rounding(self, dtype: torch.dtype, way: Way, seeds: range) -> dict[str, Tensor]:
        """Return how far each row (B,) of each tensor gets by rounding at random, in units of the last bit."""
        usual = self._read(dtype, way)
        largest = {name: torch.zeros_like(norm) for name, norm in self.norms.items()}
        for seed in seeds:
            with StochasticRounding(dtype, FEWER[dtype], seed):
                rounded = self._read(dtype, way)
            for name, x in rounded.items():
                largest[name] = torch.maximum(largest[name], errors(x, usual[name]) * 2.0 ** FEWER[dtype])
        return largest

    def _read(self, dtype: torch.dtype, way: Way) -> dict[str, Tensor]:
        model = self.models[dtype]
        return named(model, read(model, self.text, way))


def fuzz(drawn: Drawn) -> Findings:
    """Load a recipe, and read a random text with its model in all ways."""
    findings = Findings()
    try:
        recipe = drawn.load()
    except RecipeError as error:
        known = {option.key for option in reference(recipe_class())}
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
    findings.native = why_no_fast_step(model) is None
    if draw.random() < 0.3:
        model.set_state_dtype(torch.float64)

    exact = Exact(model, text)
    for name, way in {**plans, "documents alone": by_document}.items():
        exact.compare(findings, f"{name} in float64", way, exact.models[torch.float64])
    compare_at_once_and_steps(findings, exact, model, plans, "float32")
    quantized = draw.choice(list(QUANTIZED))
    model.quantize(QUANTIZED[quantized])
    compare_at_once_and_steps(findings, Exact(model, text), model, plans, quantized)
    compare_state_file(findings, model, text)


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
    other.fast_step = make_fast_step(other)
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
    belongs = state_file.owners(model, tokenizer, "")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "session.state"
        state_file.save(path, session, model, belongs, tokenizer, "run")
        again = state_file.load(path, model, belongs, tokenizer, "run")
    for mine, other in zip(state_tensors(again), state_tensors(session), strict=True):
        if mine.dtype != other.dtype or not torch.equal(mine, other):
            findings.complaints.append("state file: a tensor is not what was saved")
