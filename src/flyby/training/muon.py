"""Muon [Jordan et al., 2024]: momentum whose matrix is made orthogonal before every step.

B_t = mu B_{t-1} + G_t; with Nesterov's look ahead, M = G_t + mu B_t; W_t = (1 - lr decay) W_{t-1} - lr s O(M), where
O(M) = U V^T of M = U S V^T and s = sqrt(max(1, rows / columns)). O is found by five steps of a Newton-Schulz
iteration, X <- a X + b (X X^T) X + c (X X^T)^2 X from X = M / ||M||, whose coefficients bring every singular value that
is not tiny to between about .7 and 1.2: near enough, and nothing but products. Filters are matrices [out, in x height x
width]. All other parameters (biases, BatchNorm, heads) take plain SGD with momentum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flyby.models.optimisers import Untold

A, B, C = 3.4445, -4.7750, 2.0315
STEPS = 5


def orthogonal(matrices: Tensor, steps: int = STEPS) -> Tensor:
    """About U V^T of each of the matrices ``[n, rows, columns]``, in bfloat16 where they are on a GPU."""
    x: Tensor = matrices.bfloat16() if matrices.is_cuda else matrices
    wide = x.shape[1] <= x.shape[2]
    x = x if wide else x.mT  # the smaller square
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = A * x + (B * square + C * square @ square) @ x
    found: Tensor = x if wide else x.mT
    return found.to(matrices.dtype)


class Muon(Untold):
    """Groups with ``muon`` true are made orthogonal, the others take SGD with the same momentum. Nothing in a step
    waits for the device; ``lr`` may be a tensor there."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0, "muon": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            with_grad = [p for p in group["params"] if p.grad is not None]
            if not with_grad:
                continue
            for p in with_grad:
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            if group["muon"]:
                self._orthogonal_step(with_grad, group)
            else:
                self._plain_step(with_grad, group)

    def _plain_step(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        gradients: list[Tensor] = [p.grad for p in parameters]  # type: ignore[misc]
        if group["weight_decay"]:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=group["weight_decay"]))
        momenta = [self.state[p]["momentum_buffer"] for p in parameters]
        torch._foreach_mul_(momenta, group["momentum"])
        torch._foreach_add_(momenta, gradients)
        torch._foreach_sub_(parameters, torch._foreach_mul(momenta, group["lr"]))

    def _orthogonal_step(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        alike: dict[tuple[int, ...], list[Tensor]] = {}
        for p in parameters:
            alike.setdefault(tuple(p.shape), []).append(p)
        for shape, members in alike.items():  # one product for all matrices of a shape
            gradients: list[Tensor] = [p.grad for p in members]  # type: ignore[misc]
            momenta = [self.state[p]["momentum_buffer"] for p in members]
            torch._foreach_mul_(momenta, group["momentum"])
            torch._foreach_add_(momenta, gradients)
            ahead = torch._foreach_add(gradients, momenta, alpha=group["momentum"])
            made = orthogonal(torch.stack([one.reshape(shape[0], -1) for one in ahead]))
            scale = max(1.0, made.shape[1] / made.shape[2]) ** 0.5
            torch._foreach_mul_(members, 1 - group["lr"] * group["weight_decay"])
            moved = made * (group["lr"] * scale)
            torch._foreach_sub_(members, [one.view(shape) for one in moved])
