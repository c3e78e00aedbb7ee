"""Muon against singular value decompositions, torch's own Muon and AdamW."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from lmlong import recipe
from lmlong.attention.device_policy import CPU_POLICY, GPU_POLICY
from lmlong.model.language_model import LanguageModel
from lmlong.training.muon import Muon, step_size
from lmlong.training.optimizer import make_optimizer, parameter_groups
from lmlong.training.orthogonal import orthogonal

from .optimizers_in_ranks import optimizer_of, take_row_steps

RATE, DECAY = 3e-3, 0.1


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    values = (u.mT @ found @ v.mT).diagonal(dim1=1, dim2=2)
    assert bool((values > 0.6).all()) and bool((values < 1.25).all())
    torch.testing.assert_close(u @ torch.diag_embed(values) @ v, found)
    assert not orthogonal(torch.zeros(1, *shape)).any()


@pytest.mark.parametrize("shape", [(256, 256), (256, 64)])
def test_steps_are_those_of_torch(shape: tuple[int, int]) -> None:
    ours, theirs = (nn.Parameter(drawn(*shape, seed=7)) for _ in range(2))
    take_steps(muon([ours], [[shape[0]]], torch.bfloat16), [ours])
    # torch's match of AdamW, 0.2 sqrt(the longer side), is our step size where that side is 256
    rate = RATE * step_size(shape) / (0.2 * math.sqrt(max(shape)))
    other = torch.optim.Muon([theirs], lr=rate, weight_decay=DECAY * RATE / rate, adjust_lr_fn="match_rms_adamw")
    take_steps(other, [theirs])
    moved = (drawn(*shape, seed=7) - theirs).detach()
    assert float((ours - theirs).detach().norm()) < 1e-2 * float(moved.norm())


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
