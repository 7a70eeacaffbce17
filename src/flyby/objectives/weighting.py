"""How strongly to align: AURORA's learned lambda, its ablations and its rivals, as drop-ins for one another.

AURORA: two scalars l = log sigma^2 follow L_sigma + L_reg by SGD with momentum, beside the network's optimiser:
  L_sigma = L_local / (2 e^l_local) + L_align / (2 e^l_align) + l_local / 2 + s(p) l_align / 2   (both losses detached)
  lambda  = exp(l_local - l_align),  L_reg = gamma relu(lambda - lambda_max)^2,  s(p) = max(1e-3, (1 + cos(pi p)) / 2)
and the network minimises L_W = L_local + lambda.detach() L_align. With frozen losses the sigmas settle at L_local and
L_align / s, so lambda at s L_local / L_align (Proposition 1). The gradient of two scalars is written out by hand: no
second backward pass, and nothing of it can reach the network.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from flyby.objectives.base import ObjectiveSettings

EPSILON = 1e-3


def schedule(progress: Tensor) -> Tensor:
    """s(p) = max(1e-3, (1 + cos(pi p)) / 2), from 1 down to almost 0."""
    return (0.5 * (1 + torch.cos(math.pi * progress))).clamp_min(EPSILON)


class WeightingSettings(ObjectiveSettings):
    weighting: Literal[
        "none", "fixed", "linear", "cosine", "learnable", "gradnorm", "kendall", "decoupled", "meta-anneal", "aurora"
    ] = Field(
        "aurora", description="how lambda, the weight of alignment, comes about: none of it, by a rule, or learnt"
    )
    anneal_on: Literal["log", "data"] | None = Field(
        None, description="which term s(p) multiplies; log, or data in the as-run preset"
    )
    lambda_max: float = Field(50.0, gt=0, description="where the stability term begins")
    gamma: float = Field(1e-3, ge=0, description="strength of the stability term")
    lambda_cap: float | None = Field(None, gt=0, description="a hard cap on lambda; off by default: the bound is soft")
    lambda_start: float = Field(18.0, ge=0, description="start of the linear and cosine schedules")
    lambda_fixed: float = Field(10.0, ge=0, description="lambda of weighting: fixed")
    sigma_lr: float = Field(0.005, gt=0, description="learning rate of the two uncertainties")
    sigma_momentum: float = Field(0.9, ge=0, lt=1, description="momentum of the two uncertainties")
    sigma_clip: float = Field(1.0, gt=0, description="largest gradient of the two uncertainties")
    sigma_init: Literal["zero", "entropy"] | None = Field(None, description="zero, or entropy in the as-run preset")


class Weighting(nn.Module):
    """Base: lambda as a function of progress alone. ``weigh`` gives (what the network minimises, lambda); ``update``
    learns from it."""

    def __init__(self, settings: WeightingSettings, start: float = 0.0) -> None:
        super().__init__()
        self.settings = settings

    def strength(self, progress: Tensor) -> Tensor:
        raise NotImplementedError

    def weigh(self, local: Tensor, align: Tensor, progress: Tensor, prototypes: Tensor) -> tuple[Tensor, Tensor]:
        strength = self.capped(self.strength(progress).detach())
        return local + strength * align, strength

    def update(self, local: Tensor, align: Tensor, progress: Tensor) -> None:
        """Called after the optimiser's step with the detached losses of the batch."""

    def capped(self, strength: Tensor) -> Tensor:
        return strength if self.settings.lambda_cap is None else strength.clamp(max=self.settings.lambda_cap)

    def state(self) -> dict[str, Tensor]:
        return {}


class NoAlignment(Weighting):
    """FAFI: no anchor at all; the alignment loss is watched, not minimised."""

    def weigh(self, local: Tensor, align: Tensor, progress: Tensor, prototypes: Tensor) -> tuple[Tensor, Tensor]:
        return local, torch.zeros_like(progress)


class Fixed(Weighting):
    def strength(self, progress: Tensor) -> Tensor:
        return torch.full_like(progress, self.settings.lambda_fixed)


class Linear(Weighting):
    """FAFI+Annealing: 18 -> 0 in a straight line, by hand."""

    def strength(self, progress: Tensor) -> Tensor:
        return self.settings.lambda_start * (1 - progress)


class Cosine(Weighting):
    """lambda_0 s(p): the schedule without any learning."""

    def strength(self, progress: Tensor) -> Tensor:
        return self.settings.lambda_start * schedule(progress)


class TwoScalars(Weighting):
    """Two scalars, learnt by SGD with momentum from a gradient given in closed form; clipped on their own, to norm
    ``sigma_clip``."""

    def __init__(self, settings: WeightingSettings, start: tuple[float, float]) -> None:
        super().__init__(settings)
        self.register_buffer("scalars", torch.tensor(start, dtype=torch.float32))
        self.register_buffer("velocity", torch.zeros(2))

    scalars: Tensor
    velocity: Tensor

    def gradient(self, local: Tensor, align: Tensor, progress: Tensor) -> Tensor:
        raise NotImplementedError

    def update(self, local: Tensor, align: Tensor, progress: Tensor) -> None:
        gradient = self.gradient(local, align, progress)
        gradient = gradient * (self.settings.sigma_clip / gradient.norm().clamp_min(self.settings.sigma_clip))
        self.velocity.mul_(self.settings.sigma_momentum).add_(gradient)
        self.scalars.sub_(self.velocity, alpha=self.settings.sigma_lr)


class Learnable(TwoScalars):
    """lambda = softplus(a + b cos(pi p)). The paper names no loss for a and b; ours is lambda L_align / L_local - log
    lambda, whose minimum is the balance lambda = L_local / L_align that uncertainty weighting has too."""

    def __init__(self, settings: WeightingSettings, start: float = 0.0) -> None:
        # lambda = e^start at the start, as AURORA's.
        super().__init__(settings, (math.log(math.expm1(math.exp(start))), 0.0))

    def strength(self, progress: Tensor) -> Tensor:
        return F.softplus(self.scalars[0] + self.scalars[1] * torch.cos(math.pi * progress))

    def gradient(self, local: Tensor, align: Tensor, progress: Tensor) -> Tensor:
        phi = torch.cos(math.pi * progress)
        inner = self.scalars[0] + self.scalars[1] * phi
        slope = (align / local.clamp_min(1e-12) - 1 / F.softplus(inner)) * torch.sigmoid(inner)
        return torch.stack((slope, slope * phi))

    def state(self) -> dict[str, Tensor]:
        return {"lambda_a": self.scalars[0], "lambda_b": self.scalars[1]}


class GradNorm(Weighting):
    """lambda follows (with a memory of about ten steps) the ratio of the two losses' gradient norms at the prototypes,
    where they meet."""

    def __init__(self, settings: WeightingSettings, start: float = 0.0) -> None:
        super().__init__(settings)
        self.register_buffer("ratio", torch.ones(()))

    ratio: Tensor

    def weigh(self, local: Tensor, align: Tensor, progress: Tensor, prototypes: Tensor) -> tuple[Tensor, Tensor]:
        pull = [torch.autograd.grad(term, prototypes, retain_graph=True)[0].norm() for term in (local, align)]
        self.ratio.lerp_(pull[0] / pull[1].clamp_min(1e-12), 0.1)
        strength = self.capped(self.ratio.clone())
        return local + strength * align, strength


class Kendall(TwoScalars):
    """Plain uncertainty weighting [Kendall et al., CVPR 2018], coupled: 1/sigma^2 scales the network's gradients too.
    The scalars' own gradient is (1 - L e^-l) / 2 each; a ``lambda_cap`` holds for what the network minimises."""

    def __init__(self, settings: WeightingSettings, start: float = 0.0) -> None:
        super().__init__(settings, (start, 0.0))

    def strength(self, progress: Tensor) -> Tensor:
        return torch.exp(self.scalars[0] - self.scalars[1])

    def weigh(self, local: Tensor, align: Tensor, progress: Tensor, prototypes: Tensor) -> tuple[Tensor, Tensor]:
        total, strength = super().weigh(local, align, progress, prototypes)
        scalars = self.scalars.clone()  # they are changed in place before the next batch
        return 0.5 * (total * torch.exp(-scalars[0]) + scalars.sum()), strength

    def gradient(self, local: Tensor, align: Tensor, progress: Tensor) -> Tensor:
        return 0.5 * (1 - torch.stack((local, align)) * torch.exp(-self.scalars))

    def state(self) -> dict[str, Tensor]:
        return {"l_local": self.scalars[0], "l_align": self.scalars[1]}


class Uncertainty(TwoScalars):
    """Decoupled uncertainty weighting. ``anneal`` adds the meta-annealing prior, ``stable`` the squared hinge: both
    make AURORA."""

    def __init__(
        self, settings: WeightingSettings, start: float = 0.0, *, anneal: bool = True, stable: bool = True
    ) -> None:
        super().__init__(settings, (start, 0.0))
        self.anneal, self.stable = anneal, stable

    def strength(self, progress: Tensor) -> Tensor:
        return torch.exp(self.scalars[0] - self.scalars[1])

    def gradient(self, local: Tensor, align: Tensor, progress: Tensor) -> Tensor:
        s = schedule(progress) if self.anneal else torch.ones_like(progress)
        on_log, on_data = (s, 1.0) if self.settings.anneal_on != "data" else (1.0, s)
        losses = torch.stack((local, on_data * align))
        logs = torch.stack((torch.ones_like(s), on_log * torch.ones_like(s)))
        gradient = 0.5 * (logs - losses * torch.exp(-self.scalars))
        if self.stable:
            strength = self.strength(progress)
            hinge = 2 * self.settings.gamma * F.relu(strength - self.settings.lambda_max) * strength
            gradient = gradient + torch.stack((hinge, -hinge))
        return gradient

    def state(self) -> dict[str, Tensor]:
        return {"l_local": self.scalars[0], "l_align": self.scalars[1]}


WEIGHTINGS: dict[str, Callable[[WeightingSettings, float], Weighting]] = {
    "none": NoAlignment,
    "fixed": Fixed,
    "linear": Linear,
    "cosine": Cosine,
    "learnable": Learnable,
    "gradnorm": GradNorm,
    "kendall": Kendall,
    "decoupled": lambda settings, start: Uncertainty(settings, start, anneal=False, stable=False),
    "meta-anneal": lambda settings, start: Uncertainty(settings, start, stable=False),
    "aurora": Uncertainty,
}
