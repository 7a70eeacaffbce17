"""Co-Boosting [Dai et al., ICLR 2024]: DENSE whose images and whose ensemble make each other better.

Differences to DENSE: images the ensemble is unsure of weigh more, mean[(1 - p_y)^g CE(t, y)]; the adversarial term is
-T^2 mean KL at T = 3 without a mask; there is no L_BN; from the second epoch on the ensemble's weights take one signed
step for each minibatch of the pool, w <- clip01(w - .01 * .99^epoch sign(dCE/dw)), and are divided by their sum; and
the student learns on inputs moved by (8/255) sign(grad_x <u, softmax(t/4)>) in units of the normalised image. Two
hundred epochs of 128 images in batches of 128 are the published 20,100 steps on 25,600 images.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from flyby.fusion.base import FusionSettings, Server
from flyby.fusion.distilled.dense import Dense, DenseSettings
from flyby.fusion.distilled.distill import push
from flyby.fusion.distilled.synthesis import Pool, as_unit
from flyby.fusion.distilled.teachers import Teachers
from flyby.fusion.predictor import Predictor
from flyby.objectives.kd import softened_kl
from flyby.parcels.inbox import Inbox
from flyby.rng import generator
from flyby.training.steps import batches


class PushSettings(DenseSettings):
    push: float = Field(
        8 / 255, ge=0, description="how far distillation inputs move, in units of the normalised image; 0 leaves them"
    )
    push_temperature: float = Field(4.0, gt=0, description="temperature of the answers that the push moves")


class CoBoostingSettings(PushSettings):
    images: int = Field(128, ge=2, description="images made in each server epoch")
    batch: int = Field(128, ge=1)
    bn: float = Field(0.0, ge=0, description="weight of L_BN, which the release runs without")
    lr: float = Field(0.01, gt=0)
    weight_decay: float = Field(1e-4, ge=0)
    schedule: Literal["constant", "cosine", "one-cycle"] = "cosine"
    clip: float | None = Field(10.0, gt=0)
    temperature: float = Field(4.0, gt=0)
    adv_temperature: float = Field(3.0, gt=0)
    hardness: float = Field(1.0, ge=0, description="g in (1 - p_y)^g")
    weight_step: float = Field(
        0.01, ge=0, description="size of the ensemble weights' steps at first; 0 keeps 1/K, as does a rule that teaches"
    )
    weight_decline: float = Field(0.99, gt=0, le=1, description="factor on the weights' step after each server epoch")


class CoBoosting(Dense):
    """DENSE with hard samples, boosted ensemble weights and moved inputs."""

    name = "coboosting"
    paper = "Co-Boosting: Dai et al., ICLR 2024"
    about = "DENSE with hard samples, and ensemble weights that improve with them"
    settings_type: ClassVar[type[FusionSettings]] = CoBoostingSettings
    settings: CoBoostingSettings
    scales: Scales | None = None

    def class_term(self, teacher: Tensor, labels: Tensor) -> Tensor:
        return hard_cross_entropy(teacher, labels, self.settings.hardness)

    def adversarial(self, student: Tensor, teacher: Tensor) -> Tensor:
        temperature = self.settings.adv_temperature
        return -(temperature**2) * softened_kl(student, teacher, temperature).mean()

    def reweigh(self, pool: Pool, teachers: Teachers, seed: int, epoch: int) -> None:
        if epoch == 0 or not teachers.teaching.weighted:
            return
        if self.scales is None or self.scales.teachers is not teachers:
            self.scales = Scales(teachers, pool.weights)
        self.scales.size.fill_(self.settings.weight_step * self.settings.weight_decline**epoch)
        order = generator(seed, "server", "weights", epoch)
        for rows in batches(len(pool), self.settings.batch, order, teachers.device, least=1):
            self.scales.move(pool.said[rows], pool.labels[rows])

    def inputs(
        self, images: Tensor, said: Tensor, weights: Tensor, teachers: Teachers, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        return pushed(images, weights, teachers, rng, self.settings)

    def combine(self, parcels: Inbox, server: Server) -> Predictor:
        try:
            return super().combine(parcels, server)
        finally:
            self.scales = None


class Scales:
    """The ensemble's weights on their way. A step is some thirty kernels on a few thousand numbers, and there are as
    many steps as the student takes: on a GPU they are recorded once and replayed."""

    def __init__(self, teachers: Teachers, weights: Tensor) -> None:
        self.teachers, self.weights, self.size = teachers, weights, torch.zeros((), device=weights.device)
        self.captured = teachers.recorder()

    def move(self, said: Tensor, labels: Tensor) -> None:
        self._step(said, labels) if self.captured is None else self.captured(self._step, said, labels)

    def _step(self, said: Tensor, labels: Tensor) -> None:
        new = signed_step(self.teachers, self.weights, said.transpose(0, 1), labels, self.size)
        self.weights.copy_(new)  # in place: a recorded step reads them where they are


def pushed(
    images: Tensor, weights: Tensor, teachers: Teachers, rng: torch.Generator, settings: PushSettings
) -> tuple[Tensor, Tensor]:
    """Images moved along the gradient of a random mixture of the teacher's answers, and what clients say there."""
    x = teachers.view(as_unit(images), rng) if settings.augment else as_unit(images)
    u = torch.rand((len(images), teachers.classes), generator=rng, device=images.device) * 2 - 1
    x = push(teachers, x, weights, u, settings.push, settings.push_temperature)
    return x, teachers.say(x)


def hard_cross_entropy(teacher: Tensor, labels: Tensor, hardness: float) -> Tensor:
    """mean[(1 - p_y)^g CE(t, y)]; the factor is a weight, so no gradient passes through it."""
    each = F.cross_entropy(teacher, labels, reduction="none")
    return ((1 - (-each.detach()).exp()) ** hardness * each).mean()


def signed_step(teachers: Teachers, weights: Tensor, said: Tensor, labels: Tensor, step: float | Tensor) -> Tensor:
    """clip01(w - step sign(dCE(t, y)/dw)) divided by its sum, for what clients said [K, N, C]; 1/K where nothing is
    left."""
    weights = weights.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(teachers.answer(weights, said), labels), weights)
    moved = (weights.detach() - step * gradient.sign()).clamp(0, 1)
    total = moved.sum()
    return torch.where(total > 0, moved / total, torch.full_like(moved, 1 / len(moved)))
