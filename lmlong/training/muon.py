"""Muon: orthogonal steps for the weight matrices of the blocks, AdamW for all other weights.

A few directions dominate the gradient of a matrix. Muon (Jordan et al., 2024) replaces its momentum U S Vᵀ by U Vᵀ, so
that all directions are learned at the same rate. U Vᵀ is computed by a polynomial of the matrix (Newton-Schulz), which
needs only matrix products.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import torch
from torch import Tensor, distributed
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from lmlong.training.orthogonal import write_directions, write_directions_by_ranks, write_divided_directions

ADAMW_RMS = 0.2
"""Root mean square of AdamW's steps, as a share of the learning rate. Muon's steps get the same size, so one rate suits
both."""

BASE_WIDTH = 256
"""Width at which a Muon step has that root mean square. At any other width the largest singular value of a step is the
same, so a step changes a layer's output by the same amount."""


class Muon(torch.optim.Optimizer):
    """Muon for groups with `stacks`, the heights of the matrices stacked in each weight; AdamW for other groups.

    The first beta is the momentum of both. Each group has its own learning rate. Matrix products use `dtype`; bfloat16
    is precise enough. With `fused`, torch's fused kernels update all weights of a group at once. `ranks` processes that
    hold the same weights, gradients and moments divide the matrices among them.
    """

    partition: Any = None
    """A strategy that divides weights among ranks, so that a parameter is a flat part of many: it has the method
    `matrices` of `DeepSpeedTraining`."""

    found_inf: Tensor | None = None
    """With `fused`: a number on the device. If it is 1, a step changes neither weights nor moments."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        betas: tuple[float, float],
        dtype: torch.dtype,
        fused: bool = False,
        ranks: int = 1,
    ):
        defaults = {"betas": betas, "eps": 1e-8, "weight_decay": 0.0, "fused": fused}
        super().__init__(groups, defaults)
        self.dtype, self.ranks = dtype, ranks

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
        if not weights:  # on all ranks, which share the gradient
            return
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
        momentum, means = group["betas"][0], [self.state[weight]["momentum"] for weight in weights]
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
        if self.partition is not None:
            return [self._divided_step(*each) for each in zip(weights, updates, strict=True)]
        stacks = {id(weight): heights for weight, heights in zip(group["params"], group["stacks"], strict=True)}
        steps = [torch.empty_like(update) for update in updates]
        matrices, targets = (
            [
                matrix
                for weight, tensor in zip(weights, tensors, strict=True)
                for matrix in tensor.split(stacks[id(weight)])
            ]
            for tensors in (updates, steps)
        )
        if self.ranks > 1:
            write_directions_by_ranks(matrices, targets, self.dtype, self.ranks)
        else:
            write_directions(matrices, targets, self.dtype)
        for target in targets:
            target.mul_(step_size(target.shape))
        return steps

    def _divided_step(self, part: Tensor, update: Tensor) -> Tensor:
        """Return the step of this rank's part of weights."""
        matrices, device, rank = self.partition.matrices(part), self.partition.root_device, distributed.get_rank()
        step = torch.zeros_like(update, device=device)
        write_divided_directions(matrices, update.to(device), step, self.dtype)
        for matrix in matrices:
            step[matrix.held_by(rank)] *= step_size(matrix.shape)
        return step.to(part.device)

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


def step_size(shape: Sequence[int]) -> float:
    """Return the largest singular value of a step at learning rate 1, for a matrix of (height, width). With it, a step
    changes a layer's output by about the same amount at any width."""
    height, width = shape
    return ADAMW_RMS * math.sqrt(BASE_WIDTH * max(1, height / width))
