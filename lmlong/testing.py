"""Checks of the laws of causal attention for an attention or a feature map, on random inputs.

To test your own attention:

>>> from lmlong.testing import check_attention
>>> check_attention(TwoGates)

B batch, H heads, T time, D head dim.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmlong import recipe
from lmlong.attention import laws
from lmlong.attention.base import CausalAttention, at_least_float32
from lmlong.attention.feature_map_registry import FEATURE_MAPS
from lmlong.attention.feature_maps import FeatureMap
from lmlong.attention.inputs import draw_inputs
from lmlong.attention.laws import Case, Subject, Text, Verdict
from lmlong.attention.linear.layer import LinearAttention
from lmlong.attention.plugin_checks import explain, file_of
from lmlong.attention.plugins import Plugin, in_words
from lmlong.attention.registry import CAUSAL
from lmlong.errors import LmlongError, UsageError
from lmlong.model.build import without_memory
from lmlong.model.language_model import LanguageModel
from lmlong.report.json_values import json_keys

HEADS, HEAD_DIM, VALUE_DIM, BATCH, TIME = 3, 8, 6, 2, 100
"""Sizes of the attentions and texts that are built here."""

EXACT = {torch.float64: 1e-10, torch.float32: 2e-5}
"""Largest error between two ways of computing the same text, by dtype."""

BEGINS = (0, 1, 30, 64, 90)
"""Positions at which the documents of a packed text begin."""

PARTS = (1, 2, 30, 65, 89)
"""Cuts of a text into parts for law 12: parts of one token, and cuts on, after and before the begin of a document."""


class BrokenLaw(LmlongError):
    """An attention or a feature map breaks a law."""


@json_keys("name", "kept", "divides", "laws=verdicts")
class Report(NamedTuple):
    """The worst measured error of an attention or a feature map for each law."""

    name: str  # its class, and the file of a plug-in
    verdicts: list[Verdict]
    divides: bool = True  # whether law 12 applies

    @property
    def kept(self) -> bool:
        return all(verdict.kept for verdict in self.verdicts)


def check_attention(attention: CausalAttention | Callable[[int, int, int], CausalAttention]) -> Report:
    """Check laws 1 to 9 for an attention, or for the attention that a class or function builds from (heads, head_dim,
    value_dim), in float64 and float32, and law 12 if it has an `effect`. Laws 1 and 12 compare values and gradients.
    Raise BrokenLaw, which names the broken laws."""
    return _held(examine_attention(attention))


def check_feature_map(feature_map: FeatureMap | Callable[[int, int], FeatureMap]) -> Report:
    """Check a feature map for 3 heads of width 8, or the one that a class or function builds from (heads, head_dim). It
    must map each token by itself, products of features must not be negative, and linear attention with it must keep
    laws 1 to 10 and 12. Raise BrokenLaw, which names the broken laws."""
    return _held(examine_feature_map(feature_map))


def examine_attention(attention: CausalAttention | Callable[[int, int, int], CausalAttention]) -> Report:
    """Return the same as `check_attention`, without raising BrokenLaw."""
    made = attention if isinstance(attention, CausalAttention) else attention(HEADS, HEAD_DIM, VALUE_DIM)
    return Report(in_words(made), _worst(_verdicts(made)), made.divides)


def examine_feature_map(feature_map: FeatureMap | Callable[[int, int], FeatureMap]) -> Report:
    """Return the same as `check_feature_map`, without raising BrokenLaw."""
    made = feature_map if isinstance(feature_map, FeatureMap) else feature_map(HEADS, HEAD_DIM)
    verdicts = list(_of_feature_map(made))
    for decay in ("none", "learned") if made.signed else ("none", "learned", "channel"):
        verdicts += _verdicts(LinearAttention(HEADS, HEAD_DIM, VALUE_DIM, made, decay))
    return Report(in_words(made), _worst(verdicts))


def examine_plugin(plugin: Plugin) -> list[Report]:
    """Check the laws for each attention and feature map of a plug-in, with its default options."""
    for name in (*plugin.attentions, *plugin.feature_maps):
        _build_as_training_does(plugin, name)
    options = recipe.Attention()
    attentions = [CAUSAL[name](HEADS, HEAD_DIM, VALUE_DIM, options) for name in plugin.attentions]
    maps = [FEATURE_MAPS[name](HEADS, HEAD_DIM, options) for name in plugin.feature_maps]
    return [*map(examine_attention, attentions), *map(examine_feature_map, maps)]


def _build_as_training_does(plugin: Plugin, name: str) -> None:
    """Build a model with an attention or feature map, and its state, without memory, as training does at first."""
    attention = recipe.Attention(kind=name) if name in plugin.attentions else recipe.Attention(feature_map=name)
    options = recipe.Model(width=HEADS * HEAD_DIM, layers=1, heads=HEADS, attention=attention)
    try:
        with without_memory():
            LanguageModel(options, 1).init_state(1)
    except LmlongError:
        raise
    except Exception as error:
        raise UsageError(f"{plugin.name}: {name}: {explain(error, plugin.name)}") from error


def _held(report: Report) -> Report:
    if not report.kept:
        broken = [
            f"law {verdict.number}, {verdict.law}: measured {verdict.measured:.1e}, allowed {verdict.allowed:.1e}"
            for verdict in report.verdicts
            if not verdict.kept
        ]
        raise BrokenLaw(f"{report.name} breaks {'; '.join(broken)}.")
    return report


def _worst(verdicts: Iterator[Verdict] | Sequence[Verdict]) -> list[Verdict]:
    """Return the worst verdict for each law."""

    def excess(verdict: Verdict) -> tuple[bool, float]:
        return not verdict.kept, verdict.measured / verdict.allowed if verdict.allowed else verdict.measured

    worst: dict[int, Verdict] = {}
    for verdict in verdicts:
        if verdict.number not in worst or excess(verdict) > excess(worst[verdict.number]):
            worst[verdict.number] = verdict
    return [worst[number] for number in sorted(worst)]


class _Texts(NamedTuple):
    """An attention in one dtype, and random texts for it."""

    attention: CausalAttention
    dtype: torch.dtype

    @property
    def subject(self) -> Subject:
        return laws.of_attention(self.attention, torch.zeros((), dtype=self.dtype))

    def draw(self, seed: int = 0, time: int = TIME, **options: Any) -> Text:
        return random_text(self.attention, time, self.dtype, seed=seed, **options)

    @property
    def case(self) -> Case:
        """The texts for the laws of SAME_TEXT."""
        starts = torch.zeros(BATCH, TIME, dtype=torch.bool).index_fill(1, torch.tensor(BEGINS), True)
        cuts = (1, TIME // 3, TIME // 2, TIME - 1)
        return Case(self.subject, self.draw(), self.draw(seed=1), self.draw(starts=starts), BEGINS, cuts, 3)


Errors = Iterator[tuple[str, float, float]]
"""Measurements of a law: (subject, error, allowed error)."""


def _verdicts(attention: CausalAttention) -> Iterator[Verdict]:
    """Iterate over the verdicts of every law in both dtypes. An exception becomes a UsageError that names the law."""
    exact, single = (_Texts(copy.deepcopy(attention).cpu().to(dtype).eval(), dtype) for dtype in EXACT)
    for texts in (exact, single):
        for number in (*range(1, 11), 12):
            law = laws.LAWS[number]
            try:
                with torch.set_grad_enabled(number in (1, 12)):
                    errors = list(_errors(number, exact, texts))
            except Exception as error:
                reason = explain(error, file_of(type(attention)))
                raise UsageError(f"{in_words(attention)}: law {number}, {law}: {reason}") from error
            dtype = str(texts.dtype).removeprefix("torch.")
            yield from (Verdict(number, f"{law}: {what}{dtype}", *numbers) for what, *numbers in errors)


def _errors(number: int, exact: _Texts, texts: _Texts) -> Errors:
    if number in laws.SAME_TEXT:
        yield "", laws.measure(number, texts.case), 0.0 if number in laws.EXACT else EXACT[texts.dtype]
    elif number == 1:
        yield from _definition(exact, texts)
    else:
        yield from {8: _state_size, 9: _scales, 10: _denominators, 12: _parts}[number](texts)


def _definition(exact: _Texts, texts: _Texts) -> Errors:
    """Measure law 1 in two parts, so that the gradients of the first part's keys and values flow through the state."""
    text, upstream = exact.draw(), exact.draw(seed=2)[2]
    assert upstream is not None
    narrow, subject = cast(text, texts.dtype), texts.subject
    truth = with_gradients(lambda x: laws.reference(exact.attention, x), text, upstream)
    formula = with_gradients(lambda x: laws.reference(texts.attention, x), narrow, upstream)
    measured = with_gradients(lambda x: in_two_parts(subject, x), narrow, upstream)
    names = ["", "dq, ", "dk, ", "dv, ", *(f"d_{name}, " for name in texts.attention.inputs)]
    floor = (1 if texts.dtype == torch.bfloat16 else 16) * torch.finfo(texts.dtype).eps
    for name, mine, other, right in zip(names, measured, formula, truth, strict=False):
        allowed = max(EXACT[torch.float64] if texts is exact else 0, 4 * max(distance(other, right, upstream), floor))
        yield name, distance(mine, right, upstream), allowed


def _state_size(of: _Texts) -> Errors:
    for time in (1, TIME):
        held = laws.numbers_in_state(of.subject, of.draw(time=time))
        yield "", float(abs(held - of.attention.state_numbers(time))), 0.0
    grows = of.attention.state_numbers(1 << 31) > of.attention.state_numbers(1 << 30)  # longer than any window
    yield "state_growth, ", float(grows != (of.attention.state_growth == "per token")), 0.0


def _scales(of: _Texts) -> Errors:
    for scale in laws.SCALES:
        scale = min(scale, of.attention.largest_scale)
        text = of.draw(scale=scale)
        y, _ = of.subject.forward(text, of.subject.init_state(BATCH))
        yield f"scale {scale:g}, ", float(laws.dead_or_infinite(y, laws.reference(of.attention, text))), 0.0


def _denominators(of: _Texts) -> Errors:
    if of.attention.has_denominators:
        q, k, v, starts, inputs = laws.arguments(of.attention, of.draw())
        smallest = float(of.attention.denominators(q, k, v, of.subject.init_state(BATCH), starts, inputs).min())
        yield "", 1 / smallest if smallest > 0 else float("inf"), 1 / laws.DENOMINATOR_LIMIT


def _parts(of: _Texts) -> Errors:
    """Measure law 12. Documents begin in one of the rows."""
    if of.attention.divides:
        starts = torch.zeros(BATCH, TIME, dtype=torch.bool)
        starts[0, BEGINS[2:]] = True
        text, before = of.draw(starts=starts), of.draw(seed=1)
        yield "", laws.parts_equal_forward(of.attention, before, text, PARTS), EXACT[of.dtype]


def _of_feature_map(feature_map: FeatureMap) -> Iterator[Verdict]:
    """Iterate over the verdicts on a feature map by itself, for laws 4 and 10."""
    draw = torch.Generator().manual_seed(0)
    for scale in (1e-2, 1.0, min(1e2, feature_map.largest_scale)):
        x, other = (scale * torch.randn(BATCH, HEADS, TIME, HEAD_DIM, generator=draw) for _ in range(2))
        half = TIME // 2
        mixed = torch.cat([x[:, :, :half], other[:, :, half:]], dim=2)
        for name, phi in (("query", feature_map.query), ("key", feature_map.key)):
            try:
                features, of_mixed = phi(x).detach(), phi(mixed).detach()
            except Exception as error:
                why = explain(error, file_of(type(feature_map)))
                raise UsageError(f"{in_words(feature_map)}: {name}: {why}") from error
            if features.shape != (expected := (*x.shape[:3], feature_map.features)):
                raise UsageError(f"{in_words(feature_map)}: {name} returns {tuple(features.shape)}, not {expected}.")
            change = (features - of_mixed)[:, :, :half].abs().max()
            other_change = (phi(other).detach() - of_mixed)[:, :, half:].abs().max()
            yield Verdict(4, f"each token by itself: {name}", float(max(change, other_change)), 0.0)
        fq, fk = feature_map.query(x).detach().double(), feature_map.key(other).detach().double()
        yield Verdict(10, "products of features below 0", float((-fq @ fk.mT).clamp(min=0).max()), 0.0)


def random_text(
    attention: CausalAttention,
    time: int,
    dtype: torch.dtype,
    batch: int = BATCH,
    seed: int = 0,
    scale: float = 1.0,
    starts: Tensor | bool | None = None,
) -> Text:
    """Draw (q, k, v, document_starts, *declared inputs), with queries and keys of standard deviation `scale`. About
    every 30th token starts a document unless `starts` says which; with False, none does."""
    draw = torch.Generator().manual_seed(seed)
    sizes = (attention.head_dim, attention.head_dim, attention.value_dim)
    heads = (attention.heads, attention.kv_heads, attention.kv_heads)
    shapes = [(batch, count, time, size) for count, size in zip(heads, sizes, strict=True)]
    q, k, v = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    if not attention.has_keys:
        q, k = q[..., :0], k[..., :0]
    if starts is None:
        starts = torch.rand(batch, time, generator=draw) < 1 / 30
    begun = starts if isinstance(starts, Tensor) else None
    drawn = draw_inputs(attention.inputs, batch, time, draw, torch.float64, begun)
    return cast((q * scale, k * scale, v, begun, *drawn.values()), dtype)


def cast(text: Text, dtype: torch.dtype) -> Text:
    """Return a text (q, k, v, document_starts, *inputs) in a dtype; gates are in at least float32."""
    q, k, v, starts, *rest = text
    gates = at_least_float32(dtype)
    inputs = (x.to(gates) if x is not None and x.is_floating_point() else x for x in rest)
    return *(None if x is None else x.to(dtype) for x in (q, k, v)), starts, *inputs


def in_two_parts(subject: Subject, text: Text) -> Tensor:
    """Return the outputs of a text read in two calls."""
    assert text[0] is not None
    rows, _, time = text[0].shape[:3]
    first, state = subject.forward(laws.cut(text, 0, time // 2), subject.init_state(rows))
    return torch.cat([first, subject.forward(laws.cut(text, time // 2, time), state)[0]], dim=2)


def distance(measured: Tensor, truth: Tensor, upstream: Tensor) -> float:
    """Return the error relative to the norm of the truth, or to a tenth of the norm of the upstream gradient if that is
    larger: the gradient of the first token's query is 0 in exact arithmetic."""
    size = max(float(truth.norm()), 0.1 * float(upstream.norm()))
    error = float((measured.double() - truth).norm()) / size
    return error if error == error else float("inf")


def with_gradients(function: Callable[[Text], Tensor], x: Text, upstream: Tensor) -> list[Tensor]:
    """Return the outputs, and the gradients of all floating-point inputs."""
    leaves = tuple(t.detach().requires_grad_(t.is_floating_point()) if t is not None else None for t in x)
    y = function(leaves)
    real = [t for t in leaves if t is not None and t.requires_grad]
    gradients = torch.autograd.grad(y, real, upstream.to(y.dtype), allow_unused=True)
    return [y.detach(), *(torch.zeros_like(t) if g is None else g for t, g in zip(real, gradients, strict=True))]
