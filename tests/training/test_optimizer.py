"""The learning rate in closed form; Muon against singular value decompositions and torch's own; tables of n-grams."""

import json
import math
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from models import predict
from torch import Tensor, nn

import lmlong
from lmlong import recipe
from lmlong.attention.device_policy import CPU_POLICY, GPU_POLICY
from lmlong.model.base import count_parameters
from lmlong.model.language_model import LanguageModel
from lmlong.model.ngram_embedding import NgramEmbedding
from lmlong.model.segments import text_loss
from lmlong.training import row_adagrad
from lmlong.training.muon import Muon, step_size
from lmlong.training.optimizer import LoopOptimizer, count_steps, learning_rate_factor, make_optimizer, parameter_groups
from lmlong.training.orthogonal import orthogonal
from lmlong.training.prepare import prepare_new_run
from lmlong.training.row_adagrad import RowAdagrad
from lmlong.training.run import train

from .conftest import TABLES, Recipes, weights
from .optimizers_in_ranks import drawn, optimizer_of, take_row_steps


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


RATE, DECAY = 3e-3, 0.1


def muon(weights: list[nn.Parameter], stacks: list[list[int]], dtype: torch.dtype = torch.float32) -> Muon:
    return Muon([{"params": weights, "stacks": stacks, "weight_decay": DECAY, "lr": RATE}], (0.9, 0.99), dtype)


def take_steps(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter], count: int = 4) -> None:
    for step in range(count):
        for number, weight in enumerate(weights):
            weight.grad = drawn(*weight.shape, seed=100 * step + number).to(weight.dtype)
        optimizer.step()


@pytest.mark.parametrize("shape", [(48, 48), (32, 80), (80, 32), (1, 16)])
def test_orthogonal_has_singular_values_near_one(shape: tuple[int, int]) -> None:
    """But a zero gradient has no direction."""
    matrices = drawn(3, *shape).double()
    found = orthogonal(matrices)
    u, singular, v = torch.linalg.svd(matrices, full_matrices=False)
    values = (u.mT @ found @ v.mT).diagonal(dim1=1, dim2=2)
    large = singular > 0.003 * singular.norm(dim=1, keepdim=True)
    assert bool((values[large] > 0.78).all()) and bool((values < 1.22).all()) and float(large.double().mean()) > 0.9
    torch.testing.assert_close(u @ torch.diag_embed(values) @ v, found)
    assert not orthogonal(torch.zeros(1, *shape)).any()


@pytest.mark.parametrize("shape", [(256, 256), (256, 64)])
def test_steps_are_the_directions_of_the_momentum(shape: tuple[int, int]) -> None:
    """As by singular values, which polynomials bring near 1."""
    begin, mean = drawn(*shape, seed=7).double(), torch.zeros(shape, dtype=torch.float64)
    weight, exact = nn.Parameter(begin.float()), begin
    take_steps(muon([weight], [[shape[0]]], torch.bfloat16), [weight])
    for step in range(4):
        gradient = drawn(*shape, seed=100 * step).double()
        mean = 0.9 * mean + 0.1 * gradient
        u, _, vt = torch.linalg.svd(0.1 * gradient + 0.9 * mean, full_matrices=False)
        exact = exact * (1 - RATE * DECAY) - RATE * step_size(shape) * u @ vt
    moved, expected = weight.detach().double() - begin, exact - begin
    assert float((moved - expected).norm()) < 0.2 * float(expected.norm())
    assert float((moved * expected).sum() / expected.square().sum()) == pytest.approx(1, abs=0.05)


def test_stacked_matrices_step_alone_and_none_without_a_gradient() -> None:
    heights, gradient = [16, 16, 8], drawn(40, 16, seed=1)
    together, unused = nn.Parameter(drawn(40, 16)), nn.Parameter(drawn(8, 8))
    alone = [nn.Parameter(part.clone()) for part in together.detach().split(heights)]
    together.grad = gradient
    for weight, part in zip(alone, gradient.split(heights), strict=True):
        weight.grad = part.clone()
    optimizer = muon([unused, together], [[8], heights])
    optimizer.step()
    muon(alone, [[16], [16], [8]]).step()
    torch.testing.assert_close(together, torch.cat([weight.detach() for weight in alone]))
    assert torch.equal(unused, drawn(8, 8)) and list(optimizer.state) == [together]


def test_stacked_projections_are_separate_matrices() -> None:
    model = LanguageModel(recipe.Model(width=32, layers=1, heads=4, attention=recipe.Attention(kind="linear")), 50)
    (group,) = (group for group in parameter_groups(model, recipe.Training(steps=1)) if "stacks" in group)
    stacked = {id(w): heights for w, heights in zip(group["params"], group["stacks"], strict=True)}
    mixer, mlp = model.blocks[0].mixer, model.blocks[0].mlp
    assert stacked[id(mixer.in_proj.weight)] == [32, 32, 32, 32] and stacked[id(mlp.in_proj.weight)] == [96, 96]
    assert stacked[id(mixer.out_proj.weight)] == [32] and stacked[id(mlp.out_proj.weight)] == [32]
    assert len(stacked) == 4


@pytest.mark.parametrize(("height", "width", "share"), [(64, 64, 1), (1024, 1024, 1), (256, 64, 2), (64, 256, 1)])
def test_step_size_does_not_grow_with_the_width(height: int, width: int, share: float) -> None:
    assert step_size((height, width)) == pytest.approx(share * step_size((256, 256)))


def twins(width: int) -> list[LanguageModel]:
    """Two models with the same weights."""
    shape = recipe.Model(width=width, layers=1, heads=4, attention=recipe.Attention(kind="linear"))
    models = [LanguageModel(shape, 50) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    return models


def test_other_weights_step_by_adamw() -> None:
    """At the width where one rate suits both."""
    model, twin = models = twins(256)
    options = recipe.Training(steps=1, optimizer="muon", precision="32")
    for each, one in zip(models, (options, options.model_copy(update={"optimizer": "adamw"})), strict=True):
        take_steps(make_optimizer(each, one), list(each.parameters()))
    matrices = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    for weight, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(weight, other) == (id(weight) not in matrices)


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_fused_steps_are_the_same_or_skipped(name: Literal["muon", "adamw"]) -> None:
    """As on a GPU: a step is left out where `found_inf` is 1, also the first one."""
    options, models = recipe.Training(steps=1, optimizer=name), twins(32)
    plain, fused = (make_optimizer(m, options, p) for m, p in zip(models, (CPU_POLICY, GPU_POLICY), strict=True))
    masked: Any = fused
    weights = list(models[1].parameters())
    for step in range(3):
        before = [tensor.clone() for tensor in (*weights, *moments(fused))]
        for weight in weights:
            weight.grad = torch.full_like(weight, math.nan)
        masked.found_inf = torch.tensor(1.0)
        fused.step()
        after = [*weights, *moments(fused)]
        kept = all(torch.equal(*pair) for pair in zip(before, after, strict=step > 0))
        assert kept and all(bool(tensor.isfinite().all()) for tensor in after)
        masked.found_inf = torch.tensor(0.0)
        take_steps(plain, list(models[0].parameters()), 1)
        take_steps(fused, weights, 1)
    torch.testing.assert_close(weights, list(models[0].parameters()))
    torch.testing.assert_close(moments(fused), moments(plain))


def moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [moment for of_weight in optimizer.state.values() for moment in of_weight.values()]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_divide_the_work(tmp_path: Path, ranks: int) -> None:
    """Processes of gloo, by the operations of their matrix products. Of a table each finds another number of rows, and
    all train the mean of their gradients, to the last bit."""
    command = [sys.executable, "-W", "error::FutureWarning", Path(__file__).parent / "optimizers_in_ranks.py"]
    children = [
        subprocess.Popen([*map(str, (*command, rank, ranks, tmp_path))], stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    printed = [child.communicate(timeout=100)[0] for child in children]
    assert [child.returncode for child in children] == [0] * ranks
    operations = [json.loads(line) for line in printed]
    alone = operations[0].pop("alone")
    for name in operations[0]:
        of_ranks = [each[name] for each in operations]
        assert sum(of_ranks) == alone and max(of_ranks) < 1.03 * alone / ranks

    every = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    table, squares = take_row_steps(optimizer_of(True, ranks=1), list(range(ranks)))
    for reads_values in (True, False):
        assert all(all(map(torch.equal, each[reads_values], every[0][reads_values])) for each in every)
        mean = every[0][reads_values]
        assert torch.allclose(mean[0], table, rtol=1e-4, atol=1e-6)
        assert torch.allclose(mean[1] * ranks**2, squares, rtol=1e-4)


def row_adagrad_of(reads_values: bool = True) -> RowAdagrad:
    tables = NgramEmbedding(recipe.NgramEmbedding(orders=[1], rows=20, width=4), 6).double()
    return RowAdagrad(tables, reads_values)


@pytest.mark.parametrize("reads_values", [True, False])
def test_a_step_is_row_wise_adagrad(reads_values: bool) -> None:
    optimizer, draw = row_adagrad_of(reads_values), torch.Generator().manual_seed(0)
    table, squares = torch.zeros(20, 4, dtype=torch.float64), torch.zeros(20, dtype=torch.float64)
    for step in range(6):
        gradient = torch.zeros_like(table)
        for _ in range(3):  # accumulated batches
            index = torch.randint(12, (2, 5), generator=draw)
            rows = torch.randn(2, 5, 4, generator=draw, dtype=torch.float64) * 10.0 ** (step - 3)
            gradient.index_add_(0, index.flatten(), rows.flatten(0, 1))
            optimizer.gradients.add(index, 7 * rows)
            optimizer.expect(10)
        optimizer.step(1 / (step + 1), torch.tensor(False), scale=7.0)
        for row in range(12):
            squares[row] += sum(float(x) ** 2 for x in gradient[row]) / 4
            table[row] -= 0.1 / (step + 1) * gradient[row] / (squares[row].sqrt() + 1e-10)
    assert torch.allclose(optimizer.tables.table, table, rtol=1e-12, atol=0)
    assert optimizer.squares is not None and torch.allclose(optimizer.squares, squares, rtol=1e-12, atol=0)


@pytest.mark.parametrize("bad", ["skipped", "not finite"])
def test_a_skipped_step_changes_nothing(bad: str) -> None:
    optimizer, one = row_adagrad_of(), torch.ones(1, 4, dtype=torch.float64)
    optimizer.gradients.add(torch.tensor([3, 4, 3]), one.expand(3, 4))
    optimizer.step()
    assert optimizer.squares is not None
    before = optimizer.tables.table.clone(), optimizer.squares.clone()
    assert before[0][3].allclose(torch.tensor(-0.1).double()) and before[1][3] == 4 and before[1][4] == 1
    optimizer.gradients.add(torch.tensor([3]), one * (torch.nan if bad == "not finite" else 1.0))
    optimizer.step(1.0, torch.tensor(bad == "skipped"))
    assert torch.equal(optimizer.tables.table, before[0]) and torch.equal(optimizer.squares, before[1])
    assert not optimizer.gradients.pieces


def test_unused_rows_are_not_read() -> None:
    optimizer = row_adagrad_of()
    optimizer.tables.table[5:] = torch.nan
    optimizer.squares = torch.full((20,), torch.nan).double()
    optimizer.squares[:5] = 0
    optimizer.gradients.add(torch.tensor([3]), torch.ones(1, 4, dtype=torch.float64))
    optimizer.step()
    optimizer.gradients.add(torch.tensor([2]), torch.full((1, 4), 1e-14).double())  # a rounding error
    optimizer.step()
    assert optimizer.tables.table[2].abs().max() < 1e-4 < optimizer.tables.table[3].abs().max()
    assert optimizer.tables.table[:5].isfinite().all() and optimizer.tables.table[5:].isnan().all()


def test_rate_follows_the_schedule(recipe_of: Recipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    factors: list[float] = []
    step = RowAdagrad.step

    def noted(self: RowAdagrad, factor: float, *more: Any) -> None:
        factors.append(factor)
        step(self, factor, *more)

    monkeypatch.setattr(row_adagrad.RowAdagrad, "step", noted)
    train(recipe_of(TABLES, "training.accumulate=2", "training.warmup_steps=4", "training.steps=6"), tmp_path / "run")
    assert factors == pytest.approx([1 / 3, 2 / 3, 1, 1, 0.75, 0.25], rel=0.1)


def test_added_tables_change_no_logit_and_move_unless_frozen(recipe_of: Recipes, run: Path, tmp_path: Path) -> None:
    """Frozen while only the mixers learn a teacher's layers. A run with tables writes."""
    added, start = tmp_path / "added", recipe_of(f"training.init_from={run}", TABLES, "training.steps=3")
    tokens = torch.arange(30)[None] + 97
    before, after = prepare_new_run(recipe_of(f"training.init_from={run}")).model, prepare_new_run(start).model
    assert torch.equal(before(tokens)[0], after(tokens)[0])
    train(start, added)
    assert "".join(lmlong.load(added).stream("the ", max_tokens=20))
    train(recipe_of(f"training.init_from={added}", "training.steps=1"), tmp_path / "again")
    learned = ["training.teacher_of=layers", "model.attention.kind=delta", "training.steps=2"]
    train(recipe_of(f"training.init_from={added}", f"training.teacher={added}", *learned), tmp_path / "frozen")
    kept, changed, frozen = (weights(tmp_path / name) for name in ("added", "again", "frozen"))
    used = [each["ngram_embedding.table"].any(1).sum() for each in (kept, changed)]
    assert 0 < used[0] <= used[1]
    assert not torch.equal(kept["ngram_embedding.table"], changed["ngram_embedding.table"])
    assert all(torch.equal(kept[name], frozen[name]) for name in kept if name.startswith("ngram_embedding."))
