"""Muon: orthogonal steps for the weight matrices of the blocks, AdamW for all other weights.

A few directions dominate the gradient of a matrix. Muon (Jordan et al., 2024) replaces its momentum U S Vᵀ by U Vᵀ, so
that all directions are learned at the same rate. U Vᵀ is computed by a polynomial of the matrix (Newton-Schulz), which
needs only matrix products.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x³ and x⁵, from Jordan: five steps map singular values between 0.001 and 1 to values between 0.7
and 1.2."""

STEPS = 5

ADAMW_RMS = 0.2
"""Root mean square of AdamW's steps, as a share of the learning rate. Muon's steps get the same size, so one rate suits
both."""

BASE_WIDTH = 256
"""Width at which a Muon step has that root mean square. At any other width the largest singular value of a step is the
same, so a step changes a layer's output by the same amount."""


class Muon(torch.optim.Optimizer):
    """Muon for groups with `stacks`, the heights of the matrices stacked in each weight; AdamW for other groups.

    Each group has its own learning rate. Matrix products use `dtype`; bfloat16 is precise enough. With `fused`, torch's
    fused kernels update all weights of a group at once.
    """

    partition: Any = None
    """A strategy that divides weights among devices, so that a parameter is a flat part of many: it has the methods
    `gather` and `part_of` of `DeepSpeedTraining`."""

    found_inf: Tensor | None = None
    """With `fused`: a number on the device. If it is 1, a step changes neither weights nor moments."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        betas: tuple[float, float],
        dtype: torch.dtype,
        fused: bool = False,
    ):
        defaults = {"betas": betas, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.95, "fused": fused}
        super().__init__(groups, defaults)
        self.dtype = dtype

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            step_of = self._muon_step if "stacks" in group else self._adamw_step
            step_of(group)
        return loss

    def _muon_step(self, group: dict[str, Any]) -> None:
        weights = [weight for weight in group["params"] if weight.grad is not None]
        updates = self._updates(weights, group)
        steps, rate, decay = self._steps(group, weights, updates), group["lr"], group["weight_decay"]
        if group["fused"]:
            self._fused_update(weights, steps, rate, decay)
            return
        for weight, step in zip(weights, steps, strict=True):
            weight.mul_(1 - rate * decay).add_(step, alpha=-rate)

    def _updates(self, weights: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Return the running means of the gradients, one step ahead (Nesterov)."""
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["momentum"] = torch.zeros_like(weight)
        momentum, means = group["momentum"], [self.state[weight]["momentum"] for weight in weights]
        gradients: list[Any] = [weight.grad for weight in weights]
        if group["fused"]:  # mean + (1 - momentum) * (gradient - mean)
            self._fused_update(means, gradients, 1 - momentum, 1.0, maximize=True)
            return list(torch._foreach_lerp(gradients, means, momentum))
        return [
            gradient.lerp(mean.lerp_(gradient, 1 - momentum), momentum)
            for gradient, mean in zip(gradients, means, strict=True)
        ]

    def _fused_update(
        self, tensors: list[Tensor], gradients: list[Any], rate: float, decay: float, maximize: bool = False
    ) -> None:
        """Subtract rate * (gradient + decay * tensor), or with `maximize` rate * (decay * tensor - gradient)."""
        sgd(
            tensors,
            gradients,
            [None] * len(tensors),
            fused=True,
            found_inf=self.found_inf,
            weight_decay=decay,
            momentum=0.0,
            lr=rate,
            dampening=0.0,
            nesterov=False,
            maximize=maximize,
        )

    def _steps(self, group: dict[str, Any], weights: list[Tensor], updates: list[Tensor]) -> list[Tensor]:
        """Return the steps of weights, or of parts of weights, at learning rate 1."""
        if self.partition is None:
            stacks = {id(weight): heights for weight, heights in zip(group["params"], group["stacks"], strict=True)}
            return orthogonal_steps(updates, [stacks[id(weight)] for weight in weights], self.dtype)
        steps = []
        for part, update in zip(weights, updates, strict=True):
            whole, heights = self.partition.gather(part, update)
            steps.append(self.partition.part_of(part, orthogonal_steps(whole, heights, self.dtype)))
        return steps

    def _adamw_step(self, group: dict[str, Any]) -> None:
        weights = [weight for weight in group["params"] if weight.grad is not None]
        for weight in weights:
            if not self.state[weight]:
                means = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
                # a fused kernel counts on the device, where it may be that a step is not made
                step = torch.zeros((), device=weight.device) if group["fused"] else torch.tensor(0.0)
                self.state[weight] = {"step": step, **means}
        states = [self.state[weight] for weight in weights]
        adamw(
            weights,
            [weight.grad for weight in weights],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=group["fused"] or None,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def orthogonal_steps(updates: list[Tensor], stacks: list[list[int]], dtype: torch.dtype) -> list[Tensor]:
    """Return the steps of weights at learning rate 1. Stacked matrices are made orthogonal separately, in batches of
    equal shapes."""
    steps = [torch.empty_like(update) for update in updates]
    shapes: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
    for update, step, heights in zip(updates, steps, stacks, strict=True):
        for matrix, target in zip(update.split(heights), step.split(heights), strict=True):
            shapes.setdefault((matrix.shape[0], matrix.shape[1]), []).append((matrix, target))
    for shape, pairs in shapes.items():
        directions = orthogonal(torch.stack([matrix for matrix, _ in pairs]).to(dtype))
        for (_, target), direction in zip(pairs, directions, strict=True):
            target.copy_(direction).mul_(step_size(shape))
    return steps


def step_size(shape: Sequence[int]) -> float:
    """Return the largest singular value of a step at learning rate 1, for a matrix of (height, width). With it, a step
    changes a layer's output by about the same amount at any width."""
    height, width = shape
    return ADAMW_RMS * math.sqrt(BASE_WIDTH * max(1, height / width))


def orthogonal(matrices: Tensor) -> Tensor:
    """Return approximately U Vᵀ of matrices U S Vᵀ (N, height, width)."""
    height, width = matrices.shape[-2:]
    x = matrices.mT if height > width else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if height > width else x
