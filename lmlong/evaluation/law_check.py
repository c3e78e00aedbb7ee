"""The laws of causal attention, checked on a trained model, in its own number format and on its own device.

The rounding error of a format depends on the model, so it is measured: the definition of the same model, with a full
matrix of weights in each layer, is computed in the model's format and in float64. Four times the difference is allowed.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmlong import testing
from lmlong.attention import laws
from lmlong.attention.base import CausalAttention
from lmlong.attention.inputs import draw_inputs
from lmlong.attention.laws import DENOMINATOR_LIMIT, Case, Subject, Text, Verdict
from lmlong.decode import engine
from lmlong.decode.choice import fast_engine, why_no_fast_engine
from lmlong.evaluation.state_health import DENOMINATORS, Denominators, denominators
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.model.device import DTYPES, autocast
from lmlong.model.language_model import LanguageModel
from lmlong.model.state_size import size
from lmlong.report.json_values import json_keys
from lmlong.report.report import Report, Table
from lmlong.report.table import Column
from lmlong.testing import EXACT, PARTS, random_text

TOKENS = 300
"""Length of the text that an attention alone reads."""

ROUNDINGS = 64 * torch.finfo(torch.float32).eps / 2
"""The error that is always allowed: states are in float32 in every format, and each way sums in another order."""

NO_EFFECT = "law 12 does not apply: training.sequence_parallel needs an `effect`"

SCALE_REMEDY = """law 9: queries and keys of this standard deviation overflow or vanish. In an attention
of your own, normalize them, or declare the `largest_scale` that it supports. In a
trained model its weights are too large: lower training.learning_rate."""

LAWS = [
    Column("law", 52, align="<", value="law"),
    Column("error", 9, ".1e", value="measured"),
    Column("allowed", 10, ".1e", value="allowed"),
    Column("", 0, align="<", value=lambda verdict: "  kept" if verdict.kept else "  BROKEN"),
]


@json_keys("kept", "divides", "precision", "rows", "tokens", "laws=verdicts", "denominators")
class LawReport(NamedTuple):
    """The verdict on each law, and the denominators by position."""

    verdicts: list[Verdict]
    denominators: list[Denominators]
    precision: str
    rows: int
    tokens: int
    divides: bool  # whether law 12 applies to every attention

    @property
    def kept(self) -> bool:
        return all(verdict.kept for verdict in self.verdicts)


@torch.no_grad()
def check(loaded: TrainedLanguageModel, tokens: Tensor, document_starts: Tensor) -> LawReport:
    """Check every law on the model, over tokens (rows, time) and the starts of their documents."""
    model, precision = loaded.model, loaded.recipe.training.precision
    with autocast(loaded.device, precision):
        buckets = denominators(model, tokens, document_starts)
        text = (tokens, document_starts)
        verdicts = [*_same_text(model, precision, text), _state_size(model, tokens), _scales(model)]
    if buckets:
        smallest = min(bucket.smallest for bucket in buckets)
        # inverted, because verdicts have upper bounds
        inverse = 1 / smallest if smallest > 0 else float("inf")
        verdicts.append(Verdict(10, laws.LAWS[10], inverse, 1 / DENOMINATOR_LIMIT))
    if loaded.device.type == "cpu" and why_no_fast_engine(model) is None:
        verdicts.append(_fast_engine(model, tokens))
    verdicts += _parts_at_once(model)
    divides = all(attention.divides for attention in model.attentions)
    return LawReport(verdicts, buckets, precision, len(tokens), tokens.shape[1], divides)


def _same_text(model: LanguageModel, precision: str, text: Text) -> Iterator[Verdict]:
    """Yield laws 1 to 7, which compare ways of computing the same text."""
    tokens, document_starts = text
    assert tokens is not None and document_starts is not None
    subject, time = _subject(model), tokens.shape[1]
    with torch.autocast(tokens.device.type, enabled=False):
        truth = _by_definition(copy.deepcopy(model).double(), text)
    rounding = torch.finfo(DTYPES.get(precision, torch.float32)).eps
    allowed = max(4 * laws.error(_by_definition(model, text), truth), 4 * rounding, ROUNDINGS)
    other = (tokens.roll(1, 0).flip(1), document_starts.flip(1))
    # rows that complete blocks at different times can be batched in several ways, a single row in one
    row = text if model.hourglass is None else (tokens[:1], document_starts[:1])
    logits, _ = subject.forward(text, subject.init_state(len(tokens)))

    yield Verdict(1, "forward = definition in float64", laws.error(logits, truth), allowed)
    begins, cuts = [0, time // 3, time // 3 + 1, time // 2], (1, time // 3, time // 2, time - 1)
    starts = torch.zeros_like(document_starts).index_fill(1, torch.tensor(begins, device=tokens.device), True)
    case = Case(subject, text, other, (tokens, starts), begins, cuts, 1)
    for number in laws.SAME_TEXT:
        measured = laws.measure(number, case._replace(text=row) if number in (2, 3) else case)
        yield Verdict(number, laws.LAWS[number], measured, 0.0 if number in laws.EXACT else allowed)


def _state_size(model: LanguageModel, tokens: Tensor) -> Verdict:
    read = [model.layer_tokens(layer, tokens.shape[1]) for layer in range(len(model.attentions))]
    declared = sum(attention.state_numbers(time) for attention, time in zip(model.attentions, read, strict=True))
    _, state = model(tokens[:1])
    held = sum(size(block.attention).numbers for block in state.blocks)
    return Verdict(8, "numbers in the state beyond those declared", float(abs(held - declared)), 0.0)


def _scales(model: LanguageModel) -> Verdict:
    """Return law 9: inputs at every scale that the attention supports give outputs that are finite and not 0."""
    bad = {
        f"layer {number}, scale {scale:g}": _bad_outputs(attention, scale, model.embedding.weight)
        for number, attention in enumerate(model.attentions, 1)
        for scale in (min(scale, attention.largest_scale) for scale in laws.SCALES)
    }
    worst = max(bad, key=bad.__getitem__)
    return Verdict(9, f"{laws.LAWS[9]}: {worst if bad[worst] else 'scales 1e-4 to 1e4'}", float(sum(bad.values())), 0.0)


def _bad_outputs(attention: CausalAttention, scale: float, like: Tensor) -> int:
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads = attention.heads, attention.kv_heads
    sizes = ((heads, attention.head_dim), (kv_heads, attention.head_dim), (kv_heads, attention.value_dim))
    q, k, v = (torch.randn(1, count, TOKENS, size, generator=generator).to(like) for count, size in sizes)
    q, k = (x * scale if attention.has_keys else x[..., :0] for x in (q, k))
    drawn = draw_inputs(attention.inputs, 1, TOKENS, generator)
    inputs = {name: x.to(like.device) for name, x in drawn.items()}
    state = attention.init_state(1, like.device, like.dtype)
    y, _ = attention(q, k, v, state, None, inputs)
    return laws.dead_or_infinite(y, attention.reference(q, k, v, None, inputs))


def _parts_at_once(model: LanguageModel) -> Iterator[Verdict]:
    """Yield law 12, on random inputs in the dtype of the weights, if an attention has an effect."""
    weight, errors = model.embedding.weight, []
    for attention in {type(attention): attention for attention in model.attentions}.values():
        if attention.divides:
            drawn = (random_text(attention, TOKENS, weight.dtype, seed=seed) for seed in range(2))
            before, text = (tuple(None if x is None else x.to(weight.device) for x in each) for each in drawn)
            errors.append(laws.parts_equal_forward(attention, before, text, PARTS))
    if errors:
        yield Verdict(12, laws.LAWS[12], max(errors), EXACT[weight.dtype])


def _subject(model: LanguageModel) -> Subject:
    """Return the model as a subject of the laws: (tokens, document_starts) to logits."""

    def forward(x: Text, state: Any) -> tuple[Tensor, Any]:
        assert x[0] is not None
        hidden, after = model(x[0], state, x[1])
        return model.logits(hidden), after

    def step(x: Text, state: Any) -> tuple[Tensor, Any]:
        tokens, document_starts = x
        assert tokens is not None
        if document_starts is not None:  # `step` cannot begin a document
            return forward(x, state)
        logits, state = model.step(tokens[:, 0], state)
        return logits[:, None], state

    return Subject(model.init_state, forward, step, model.settle)


def _fast_engine(model: LanguageModel, tokens: Tensor) -> Verdict:
    """Return law 11, of the fast engine, which computes in float32 whatever the model was trained in."""
    text = (tokens if model.hourglass is None else tokens[:1], None)
    truth = _by_definition(copy.deepcopy(model).double(), text)
    allowed = max(4 * laws.error(_by_definition(model, text), truth), ROUNDINGS)
    fast = copy.copy(model)
    fast.engine = fast_engine(fast, tried=False)

    def step(x: Text, state: Any) -> tuple[Tensor, Any]:
        assert x[0] is not None
        logits, state = engine.step(fast, x[0][:, 0], state)
        return logits[:, None], state

    subject = Subject(model.init_state, _subject(model).forward, step, model.settle)
    error = laws.steps_equal_forward(subject, text)
    return Verdict(11, laws.LAWS[11], error, allowed)


def _by_definition(model: LanguageModel, text: Text) -> Tensor:
    """Return the logits of a text, computed with the reference of each layer's attention."""

    def replace(attention: CausalAttention, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> Any:
        q, k, v, _, *rest = inputs
        return attention.reference(q, k, v, *rest).to(v.dtype), output[1]

    tokens, document_starts = text
    assert tokens is not None
    with ExitStack() as hooks:
        for attention in model.attentions:
            hooks.callback(attention.register_forward_hook(replace).remove)
        return model.logits(model(tokens, None, document_starts)[0])


def law_report(report: LawReport) -> Report:
    """Return the laws, then the denominators by position."""
    broken = sum(not verdict.kept for verdict in report.verdicts)
    summary = [
        f"{broken} of {len(report.verdicts)} laws broken" if broken else "all laws kept",
        f"{report.rows} rows of {report.tokens:,} tokens, computed in {report.precision}",
        *_remedies(report.verdicts),
        *([] if report.divides else [NO_EFFECT]),
    ]
    tables = [Table("", LAWS, report.verdicts), Table("", DENOMINATORS, report.denominators)]
    return Report([*(table for table in tables if table.rows), "\n".join(summary)], report)


def _remedies(verdicts: Sequence[Verdict]) -> list[str]:
    """Return what to do about broken laws, where the law's name does not tell."""
    return [SCALE_REMEDY] if any(verdict.number == 9 and not verdict.kept for verdict in verdicts) else []


def plugin_report(reports: Sequence[testing.Report]) -> Report:
    """Return the laws of each attention and feature map of plug-ins."""
    parts = []
    for report in reports:
        no_effect = [] if report.divides else ["", NO_EFFECT]
        table = Table(f"{report.name}\n\n", LAWS, report.verdicts)
        parts.append("\n".join([str(table), *no_effect, *_remedies(report.verdicts)]))
    broken = [report.name for report in reports if not report.kept]
    return Report([*parts, f"laws broken by {', '.join(broken)}" if broken else "all laws kept"], reports)
