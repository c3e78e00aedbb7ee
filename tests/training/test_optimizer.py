"""The course of the learning rate in closed form, and what decays."""

from functools import partial
from typing import Any, Literal

import pytest
import torch
from models import predict

from lmlong import recipe
from lmlong.model.base import count_parameters
from lmlong.model.language_model import LanguageModel
from lmlong.model.segments import text_loss
from lmlong.training.optimizer import LoopOptimizer, count_steps, learning_rate_factor, make_optimizer


def options(**changes: object) -> recipe.Training:
    return recipe.Training(**({"steps": 100, "warmup_steps": 10} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["cosine", "constant", "warmup-stable-decay"])
def test_learning_rate_follows_its_schedule(schedule: Literal["cosine", "constant", "warmup-stable-decay"]) -> None:
    training = options(schedule=schedule, final_learning_rate=0.1, decay_fraction=0.2)
    factors = [learning_rate_factor(step, 100, training) for step in range(101)]
    assert factors[:11] == pytest.approx([*((step + 1) / 10 for step in range(10)), 1])
    match schedule:
        case "cosine":
            assert (factors[55], factors[100]) == pytest.approx((0.55, 0.1))
        case "constant":
            assert set(factors[10:]) == {1.0}
        case _:
            assert set(factors[10:81]) == {1.0}
            assert (factors[90], factors[100]) == pytest.approx((0.55, 0.1))


def test_short_run_warms_up_over_half_at_most() -> None:
    assert [learning_rate_factor(step, 4, options()) for step in range(3)] == [0.5, 1.0, 1.0]


def test_only_matrices_decay() -> None:
    model = LanguageModel(recipe.Model(width=32, layers=2, heads=4, attention=recipe.Attention(kind="linear")), 50)
    groups = make_optimizer(model, options()).param_groups
    decayed = [weight for group in groups if group["weight_decay"] for weight in group["params"]]
    assert all(weight.ndim == 2 for weight in decayed)
    inner = 96
    assert sum(weight.numel() for weight in decayed) == 50 * 32 + 2 * (5 * 32**2 + 3 * 32 * inner)
    assert sum(weight.numel() for group in groups for weight in group["params"]) == count_parameters(model)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"steps": 7}, 7),
        ({"tokens": 1000}, 10),
        ({"tokens": 1001}, 11),
        ({"steps": 7, "tokens": 1000}, 7),
        ({"steps": 70, "tokens": 1000}, 10),
        ({"epochs": 2.5}, 13),
        ({"epochs": 2.5, "steps": 12}, 12),
        ({"epochs": 1e-9}, 1),
    ],
)
def test_first_limit_ends_the_run(limits: dict[str, Any], expected: int) -> None:
    assert count_steps(recipe.Training(**limits), 100, text_tokens=502) == expected


def test_untied_output_is_trained_as_the_embedding() -> None:
    model = LanguageModel(recipe.Model(width=64, layers=1, tied_output=False), 50)
    group = make_optimizer(model, options(optimizer="muon")).param_groups[0]
    assert [id(weight) for weight in group["params"]] == [id(model.embedding.weight), id(model.lm_head.weight)]
    assert group["lr_scale"] == 2 and group["weight_decay"] > 0


def test_muon_changes_as_much_at_any_width() -> None:
    """Four steps, by default options: what layers, gates and logits change by, root mean square."""
    narrow, wide = _changes(64), _changes(256)
    assert narrow.keys() == wide.keys() and len(narrow) == 5
    for name, change in narrow.items():
        assert 0.5 < wide[name] / change < 1.7, f"{name}: {change} at width 64, {wide[name]} at 256"


def _changes(width: int) -> dict[str, float]:
    torch.manual_seed(1)
    size = recipe.Model(width=width, layers=2, heads=width // 32, attention=recipe.Attention(kind="linear"))
    model = LanguageModel(size, 500)
    optimizer = make_optimizer(model, options(optimizer="muon", learning_rate=4e-3))
    tokens = torch.randint(500, (2, 129), generator=torch.Generator().manual_seed(0))
    before = _read(model, tokens)
    for _ in range(4):
        optimizer.zero_grad()
        (text_loss(model, tokens[:, :-1], tokens[:, 1:])[0] / 256).backward()
        optimizer.step()
    return {name: float((after - before[name]).square().mean().sqrt()) for name, after in _read(model, tokens).items()}


@torch.no_grad()
def _read(model: LanguageModel, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what the blocks, their gates and the head put out."""
    found: dict[str, torch.Tensor] = {}

    def keep(name: str, module: torch.nn.Module, inputs: object, output: Any) -> None:
        found[name] = output if isinstance(output, torch.Tensor) else output[0]

    parts: dict[str, torch.nn.Module] = {f"block {n}": block for n, block in enumerate(model.blocks)}
    parts |= {f"gate {n}": block.mixer.forget_gate for n, block in enumerate(model.blocks)}
    hooks = [part.register_forward_hook(partial(keep, name)) for name, part in parts.items()]
    found["logits"] = predict(model, tokens[:, :-1])[0]
    for hook in hooks:
        hook.remove()
    return found


def test_loop_optimizer_trains_tables() -> None:
    tables = recipe.NgramEmbedding(rows=8, width=2)
    model = LanguageModel(recipe.Model(width=8, layers=1, heads=1, ngram_embedding=tables), 50)
    optimizer, tokens = LoopOptimizer(model, options()), torch.arange(12)[None]
    text_loss(model, tokens[:, :-1], tokens[:, 1:])[0].backward()
    assert optimizer.step() > 0
    assert model.ngram_embedding is not None and model.ngram_embedding.table.any()
    assert all(weight.grad is None for weight in model.parameters())
