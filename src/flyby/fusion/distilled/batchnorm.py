"""What the BatchNorm layers of a frozen network say about images it never saw: how far the images' statistics are from
the data's (L_BN)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

# (mean, variance, running mean, running variance), each [C] -> how far one layer is off
Apart = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Say = Callable[[Any, Tensor], Tensor]  # (network, prepared images) -> what it says of them


def norms(network: nn.Module) -> list[_BatchNorm]:
    return [m for m in network.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]


class Moments(torch.autograd.Function):
    """Mean and variance (without correction) of each channel, over images and places. ``torch.var_mean`` says the same,
    but through a float32 copy of every layer's input and a derivative that finds the mean once more: on a GPU that
    takes twice as long as the whole network.
    """

    EPS = 1e-5  # the GPU's kernel gives 1 / sqrt(var + eps), finite for a channel that is always the same

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.is_cuda:
            mean, inverse = torch.batch_norm_stats(x, Moments.EPS)
            var = inverse**-2 - Moments.EPS
        else:
            var, mean = torch.var_mean(x.float(), [d for d in range(x.ndim) if d != 1], correction=0)
        ctx.save_for_backward(x, mean)
        return mean, var

    @staticmethod
    def backward(ctx: Any, d_mean: Tensor, d_var: Tensor) -> Tensor:
        """d/dx = d_mean / n + d_var 2 (x - mean) / n: one slope and one shift per channel."""
        x, mean = ctx.saved_tensors
        n = x.numel() // x.shape[1]
        slope = 2 * d_var / n
        shift = d_mean / n - slope * mean
        if x.is_cuda:
            moved: Tensor = torch.batch_norm_elemt(x, slope, shift, torch.zeros_like(mean), torch.ones_like(mean), 0.0)
            return moved
        shape = (1, -1) + (1,) * (x.ndim - 2)
        return torch.addcmul(shift.view(shape), slope.view(shape), x.float()).to(x.dtype)


def distance(mean: Tensor, var: Tensor, running_mean: Tensor, running_var: Tensor) -> Tensor:
    """As published: ||mean - running mean|| + ||var - running var||."""
    off: Tensor = torch.linalg.vector_norm(mean - running_mean) + torch.linalg.vector_norm(var - running_var)
    return off


def relative(mean: Tensor, var: Tensor, running_mean: Tensor, running_var: Tensor) -> Tensor:
    """How far the layer's normalised outputs are from mean 0 and variance 1: mean_c |mean - running mean| / sigma +
    |ln(var / sigma^2)|."""
    square = running_var + Moments.EPS
    return (
        (mean - running_mean).abs() / square.sqrt() + ((var.clamp(min=0) + Moments.EPS) / square).log().abs()
    ).mean()


def with_distance(
    network: nn.Module, x: Tensor, apart: Apart = distance, say: Say | None = None
) -> tuple[Tensor, Tensor]:
    """The network's output (or what it is asked to ``say``), and how far what its BatchNorm layers saw is from their
    running statistics: ``distance`` summed over the layers, or ``relative``, its mean over them."""
    terms: list[Tensor] = []

    def see(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(module, _BatchNorm)
        assert module.running_mean is not None
        assert module.running_var is not None
        mean, var = Moments.apply(inputs[0])  # type: ignore[no-untyped-call]
        terms.append(apart(mean, var, module.running_mean, module.running_var))

    hooks = [module.register_forward_pre_hook(see) for module in norms(network)]
    try:
        out = network(x).float() if say is None else say(network, x)
    finally:
        for hook in hooks:
            hook.remove()
    if not terms:
        return out, out.new_zeros(())
    looks = len(terms) // len(hooks)  # a network that knows a shift may look at images in all its ways
    return out, torch.stack(terms).mean() if apart is relative else torch.stack(terms).sum() / looks


def without_distance(
    network: nn.Module, x: Tensor, apart: Apart = distance, say: Say | None = None
) -> tuple[Tensor, Tensor]:
    out = network(x).float() if say is None else say(network, x)
    return out, out.new_zeros(())
