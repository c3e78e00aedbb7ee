"""`lmlong check` passes on every form of attention and fails on code that was tampered with."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attention.cases import every_form
from click.testing import CliRunner
from grids import every_nth, thinned
from machine import needs_native
from models import stirred

from lmlong import recipe
from lmlong.attention import laws
from lmlong.attention.feature_maps import Elu
from lmlong.attention.linear import chunk, layer
from lmlong.cli.check import check as command
from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.decode.choice import why_no_fast_engine
from lmlong.evaluation.law_check import LawReport, check, law_report
from lmlong.evaluation.state_health import denominators
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.samples import sampled_text
from lmlong.model.base import quantize
from lmlong.model.language_model import LanguageModel

ELU = recipe.Attention(kind="linear", feature_map="elu", decay="none")


def trained(form: recipe.Attention, precision: Any = "32", options: recipe.Model | None = None) -> TrainedLanguageModel:
    options = options or recipe.Model(width=16, layers=2, heads=2, attention=form)
    torch.manual_seed(0)  # also draws the projection of FAVOR+
    model = stirred(LanguageModel(options, ByteTokenizer().vocabulary), 0.3).eval()
    training = recipe.Training(steps=1, precision=precision)
    return TrainedLanguageModel(model, ByteTokenizer(), recipe.Recipe(model=options, training=training), Path())


def checked(
    form: recipe.Attention, precision: Any = "32", tokens: int = 100, options: recipe.Model | None = None
) -> LawReport:
    loaded = trained(form, precision, options)
    return check(loaded, *sampled_text(loaded, rows=2, tokens=tokens))


@needs_native
def test_a_model_that_was_compiled_is_checked_like_any_other() -> None:
    loaded = trained(recipe.Attention(kind="linear"))
    text = sampled_text(loaded, rows=2, tokens=50)
    before = check(loaded, *text)
    loaded.use_fast_engine()
    assert check(loaded, *text) == before


def laws_of(form: recipe.Attention) -> set[int]:
    """The numbers of the laws that apply to a model."""
    model = LanguageModel(recipe.Model(width=16, layers=2, heads=2, attention=form), 50)
    applies = {
        10: any(attention.has_denominators for attention in model.attention_parts),
        11: why_no_fast_engine(model) is None,
        12: all(attention.divides for attention in model.attentions),
    }
    return {number for number in laws.LAWS if applies.get(number, True)}


def broken(report: LawReport) -> set[str]:
    return {verdict.law for verdict in report.verdicts if not verdict.kept}


@thinned(every_nth(9, every_form), pytest.mark.parametrize("precision", ["32", "bf16"]))
def test_every_attention_keeps_the_laws(form: recipe.Attention, precision: str) -> None:
    report = checked(form, precision)
    assert broken(report) == set()
    assert {verdict.number for verdict in report.verdicts} == laws_of(form)
    assert bool(report.denominators) == (10 in laws_of(form))


@thinned(every_nth(15, every_form), pytest.mark.parametrize("weights", ["bf16", "int8", "int4"]))
def test_every_attention_keeps_the_laws_with_quantized_weights(form: recipe.Attention, weights: Any) -> None:
    loaded = trained(form)
    text = sampled_text(loaded, rows=2, tokens=100)
    quantize(loaded.model, weights)
    report = check(loaded, *text)
    assert broken(report) == set()
    first = report.verdicts[0]
    assert first.measured < first.allowed < (1e-4 if weights == "bf16" else 0.2)


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No native code, which changes in Python would not reach."""
    monkeypatch.setattr(layer.LinearAttention, "kernels", dict.fromkeys(("native", "torch"), chunk.ChunkKernel))


def coarse(step: Any) -> Any:
    """A step whose normalizer is rounded to bfloat16."""

    def rounded(*inputs: Any) -> Any:
        y, state = step(*inputs)
        return y, state._replace(z=state.z.bfloat16().float())

    return rounded


def careless(step: Any) -> Any:
    """A step that changes its state in place."""

    def changing(fq: Any, fk: Any, v: Any, state: Any, *rest: Any) -> Any:
        y, after = step(fq, fk, v, state, *rest)
        state.z.copy_(after.z)
        return y, after

    return changing


FAULTS: dict[str, tuple[Any, str, Any, set[str]]] = {
    "a mask shows the future": (
        *(chunk, "masked", lambda masked: lambda weights, reach: masked(weights, reach) + 1e-3),
        {"the future never changes the past", "token by token = forward"},
    ),
    "starts are ignored": (
        *(chunk, "decay_masks", lambda masks: lambda x, *rest: masks(x._replace(document_starts=None), *rest)),
        {"packed documents are independent"},
    ),
    "a coarse normalizer": (layer, "recurrent_step", coarse, {"token by token = forward"}),
    "a state changed in place": (layer, "recurrent_step", careless, {"a state is not modified"}),
    "a dead denominator": (Elu, "query", lambda _: lambda self, q: q.exp() * 1e-12, {"1 / smallest denominator"}),
}


@pytest.mark.usefixtures("by_torch")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_breaks_the_laws_that_it_violates(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, change, laws = FAULTS[fault]
    monkeypatch.setattr(module, name, change(getattr(module, name)))
    assert laws <= broken(checked(ELU))


def test_outputs_that_are_not_finite_are_found_with_their_layer_scale_and_remedy() -> None:
    loaded = trained(recipe.Attention(kind="linear", feature_map="hedgehog"))
    text = sampled_text(loaded, rows=2, tokens=50)
    with torch.no_grad():
        next(loaded.model.attentions[1].feature_map.parameters()).fill_(3e38)
    report = check(loaded, *text)
    assert any(law.startswith("outputs not finite or dead: layer 2, scale 1") for law in broken(report))
    assert "lower training.learning_rate" in law_report(report).text()


@pytest.mark.usefixtures("by_torch")
def test_the_command_prints_a_table_or_json_and_its_exit_code(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [str(run), "--device", "cpu"]
    done = CliRunner().invoke(command, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "all laws kept" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    # the classic leak: a maximum over the sequence, which cancels but for the floor
    monkeypatch.setattr(Elu, "key", lambda self, k: self.query(k - k.amax(2, keepdim=True)))
    done = CliRunner().invoke(command, [*words, "--json"], catch_exceptions=False)
    assert done.exit_code == 1
    result = json.loads(done.stdout)
    assert not result["kept"]
    found = {law["law"] for law in result["laws"] if not law["kept"]}
    assert {"the future never changes the past", "token by token = forward", "any cut = forward"} <= found


@pytest.mark.parametrize(
    ("kind", "downsample", "second", "expected"),
    [
        ("linear", None, 60, [*((n // 2 + 1, n, n // 2 + 1, n) for n in (1, 3, 7, 15, 31)), (32, 60, 32, 60)]),
        # documents of 14 and 10 blocks of 4, at the positions of their last tokens
        (
            ["window", "linear", "window"],
            recipe.Downsample(),
            58,
            [(4, 7, 1, 1), (8, 15, 2, 3), (16, 31, 4, 7), (32, 58, 8, 14)],
        ),
    ],
)
def test_denominators_by_position_in_closed_form(
    kind: Any, downsample: Any, second: int, expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 8 features of one everywhere, the t-th token or block of a document divides by 8 t."""
    monkeypatch.setattr(Elu, "query", lambda self, q: torch.ones_like(q))
    form = recipe.Attention(kind=kind, decay="none")
    model = LanguageModel(recipe.Model(width=16, layers=3, heads=2, attention=form, downsample=downsample), 50)
    starts = torch.zeros(1, 100, dtype=torch.bool)
    starts[0, [0, second]] = True
    found = denominators(model, torch.zeros(1, 100, dtype=torch.long), starts)
    assert [(b.first, b.last, b.smallest / 8, b.largest / 8) for b in found] == expected
