"""Random recipes over every option: what is accepted builds, and all ways to read a text agree; the rest is refused.

The recipe of a number that fails, and what disagrees: `tools/fuzz.py recipes --cases 1 --seed NUMBER`.
"""

from collections import Counter
from functools import cache

import pytest
import torch
from machine import needs_native
from model import agreement
from model.agreement import QUANTIZED, Findings, fuzz
from model.recipe_draws import Drawn, draw_recipe, undrawn

from lmlong.model.language_model import LanguageModel
from lmlong.recipe.kinds import ATTENTION_KINDS

ALL = 360
CARELESS = 4


def usual_numbers() -> list[int]:
    """Return numbers whose recipes together use every option and every word of it, and of some that may be refused."""
    recipes = [draw_recipe(number) for number in range(ALL)]
    careful: list[Drawn] = []
    missing = undrawn([])
    # small models that use many words first
    for drawn in sorted(recipes, key=lambda drawn: (drawn.values["model"]["layers"] > 2, len(undrawn([drawn])))):
        if not drawn.careless and len(fewer := undrawn([*careful, drawn])) < len(missing):
            careful, missing = [*careful, drawn], fewer
    careless = [drawn for drawn in recipes if drawn.careless]
    return [drawn.number for drawn in [*careful, *careless[:CARELESS]]]


USUAL = usual_numbers()


@cache
def findings(number: int) -> Findings:
    return fuzz(draw_recipe(number))


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=[] if number in USUAL else pytest.mark.slow) for number in range(ALL)]
)
def test_all_ways_to_read_agree(number: int) -> None:
    assert findings(number).complaints == []


def test_every_option_and_every_word_of_it_is_used_by_a_model() -> None:
    accepted = [draw_recipe(number) for number in USUAL if not findings(number).refused]
    of_linformer = {missing for missing in undrawn(accepted) if missing.startswith("attention.linformer.")}
    of_encoders = {f"attention.kind: {kind}" for kind, about in ATTENTION_KINDS.items() if not about.causal} | {
        "positions: absolute",
        "encoder",
    }
    assert undrawn(accepted) - of_linformer == of_encoders


@needs_native
def test_there_are_steps_by_both_engines_with_all_weights() -> None:
    ways = Counter(way for number in USUAL for way in findings(number).ways)
    for weights in ("float32", *QUANTIZED):
        for engine in ("torch", "native code"):
            assert min(ways[f"{plan} by {engine} in {weights}"] for plan in ("token by token", "in parts")) >= 3
    assert len({findings(number).native for number in USUAL}) == 2


@needs_native
def test_a_step_that_is_off_by_little_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    number = next(number for number in USUAL if findings(number).native)
    fast_engine = agreement.fast_engine

    def off(model: LanguageModel) -> object:
        with torch.no_grad():
            model.norm.weight.mul_(1 + 1e-4)
        return fast_engine(model)

    monkeypatch.setattr(agreement, "fast_engine", off)
    found = fuzz(draw_recipe(number)).complaints
    assert found and all("by native code" in complaint and "logits" in complaint for complaint in found)
