"""Co-Boosting [Dai et al., ICLR 2024]: DENSE whose images and whose ensemble make each other better.

Differences to DENSE: images the ensemble is unsure of weigh more, mean[(1 - p_y)^g CE(t, y)]; the adversarial term is
-mean KL at T = 3 without a mask; after each synthesis the ensemble's weights take one signed step over the whole pool,
w <- clip01(w - .01 * .99^epoch sign(dCE/dw)); and the student learns on inputs moved by (8/255) sign(grad_x <u,
softmax(t/4)>).
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from flyby.fusion.base import FusionSettings
from flyby.fusion.distilled.dense import Dense, DenseSettings
from flyby.fusion.distilled.distill import push
from flyby.fusion.distilled.synthesis import Pool, Teachers, as_unit, mix
from flyby.objectives.kd import softened_kl


class PushSettings(FusionSettings):
    push: float = Field(8 / 255, ge=0, description="how far distillation inputs move, in 0..1 units; 0 leaves them")
    push_temperature: float = Field(4.0, gt=0)


class CoBoostingSettings(DenseSettings, PushSettings):
    lr: float = Field(0.01, gt=0)
    weight_decay: float = Field(1e-4, ge=0)
    schedule: Literal["constant", "cosine"] = "cosine"
    clip: float | None = Field(10.0, gt=0)
    temperature: float = Field(4.0, gt=0)
    adv_temperature: float = Field(3.0, gt=0)
    hardness: float = Field(1.0, ge=0, description="g in (1 - p_y)^g")
    weight_step: float = Field(0.01, ge=0, description="size of the ensemble weights' first step; 0 keeps 1/K")
    weight_decline: float = Field(0.99, gt=0, le=1)


class CoBoosting(Dense):
    """DENSE with hard samples, boosted ensemble weights and moved inputs."""

    name = "coboosting"
    paper = "Co-Boosting: Dai et al., ICLR 2024"
    about = "DENSE with hard samples, and ensemble weights that improve with them"
    settings_type: ClassVar[type[FusionSettings]] = CoBoostingSettings
    settings: CoBoostingSettings

    def class_term(self, teacher: Tensor, labels: Tensor) -> Tensor:
        return hard_cross_entropy(teacher, labels, self.settings.hardness)

    def adversarial(self, student: Tensor, teacher: Tensor) -> Tensor:
        return -softened_kl(student, teacher, self.settings.adv_temperature).mean()

    def reweigh(self, pool: Pool, epoch: int) -> None:
        step = self.settings.weight_step * self.settings.weight_decline**epoch
        new = signed_step(pool.weights, pool.logits.transpose(0, 1), pool.labels, step)
        pool.weights.copy_(new)  # in place: a recorded step reads them where they are

    def inputs(
        self, images: Tensor, logits: Tensor, weights: Tensor, teachers: Teachers, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        return pushed(images, weights, teachers, rng, self.settings)


def pushed(
    images: Tensor, weights: Tensor, teachers: Teachers, rng: torch.Generator, settings: PushSettings
) -> tuple[Tensor, Tensor]:
    """Images moved along the gradient of a random mixture of the ensemble's answers, and the clients' logits there."""
    u = torch.rand((len(images), teachers.specs[0].classes), generator=rng, device=images.device) * 2 - 1
    x = push(teachers, as_unit(images), weights, u, settings.push, settings.push_temperature)
    return x, teachers.logits(x)


def hard_cross_entropy(teacher: Tensor, labels: Tensor, hardness: float) -> Tensor:
    """mean[(1 - p_y)^g CE(t, y)]; the factor is a weight, so no gradient passes through it."""
    each = F.cross_entropy(teacher, labels, reduction="none")
    return ((1 - (-each.detach()).exp()) ** hardness * each).mean()


def signed_step(weights: Tensor, logits: Tensor, labels: Tensor, step: float) -> Tensor:
    """clip01(w - step sign(dCE(sum_k w_k f_k, y)/dw)) for clients' logits [K, N, C]."""
    weights = weights.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(mix(weights, logits), labels), weights)
    return (weights.detach() - step * gradient.sign()).clamp(0, 1)
