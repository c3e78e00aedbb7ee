"""`lmlong check` passes on every form of attention and fails on code that was tampered with."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attention.cases import every_form
from commands import lmlong
from grids import every_nth, thinned
from machine import needs_native
from models import stirred

from lmlong import recipe
from lmlong.attention import laws
from lmlong.attention.feature_maps import Elu
from lmlong.attention.linear import chunk, layer
from lmlong.data.tokenizers.base import ByteTokenizer
from lmlong.decode.choice import why_no_fast_engine
from lmlong.evaluation.law_check import LawReport, check, law_report
from lmlong.inference.loading import TrainedLanguageModel
from lmlong.inference.samples import sampled_text
from lmlong.model.base import quantize
from lmlong.model.language_model import LanguageModel


def trained(form: recipe.Attention, precision: Any = "32") -> TrainedLanguageModel:
    options = recipe.Model(width=16, layers=2, heads=2, attention=form)
    torch.manual_seed(0)  # also draws the projection of FAVOR+
    model = stirred(LanguageModel(options, ByteTokenizer().vocabulary), 0.3).eval()
    training = recipe.Training(steps=1, precision=precision)
    return TrainedLanguageModel(model, ByteTokenizer(), recipe.Recipe(model=options, training=training), Path())


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


@thinned(
    every_nth(9, every_form),
    pytest.mark.parametrize(
        ("precision", "weights"), [("32", "32"), ("bf16", "32"), ("32", "bf16"), ("32", "int8"), ("32", "int4")]
    ),
)
def test_every_attention_keeps_the_laws(form: recipe.Attention, precision: str, weights: Any) -> None:
    loaded = trained(form, precision)
    text = sampled_text(loaded, rows=2, tokens=100)
    if weights != "32":
        quantize(loaded.model, weights)
    report = check(loaded, *text)
    assert broken(report) == set()
    assert bool(report.denominators) == (10 in laws_of(form))
    if weights == "32":
        assert {verdict.number for verdict in report.verdicts} == laws_of(form)
    else:
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
    loaded = trained(recipe.Attention(kind="linear", feature_map="elu", decay="none"))
    assert laws <= broken(check(loaded, *sampled_text(loaded, rows=2, tokens=100)))


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
    monkeypatch.setattr("lmlong.cli.check.TOKENS", 60)
    done = lmlong("check", run, "--device", "cpu")
    assert (done.returncode, "all laws kept" in done.stdout) == (0, True), done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    # the classic leak: a maximum over the sequence, which cancels but for the floor
    monkeypatch.setattr(Elu, "key", lambda self, k: self.query(k - k.amax(2, keepdim=True)))
    done = lmlong("check", run, "--device", "cpu", "--json")
    assert done.returncode == 1
    result = json.loads(done.stdout)
    assert not result["kept"]
    found = {law["law"] for law in result["laws"] if not law["kept"]}
    assert {"the future never changes the past", "token by token = forward", "any cut = forward"} <= found
